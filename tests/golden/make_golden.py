"""Write the reference answers of transformers (float32, CPU). Needs the ``perf`` extra: torch and transformers.

    python -m tests.golden.make_golden

The weights are read and dequantised by transformers and the gguf package, so nothing of the engine's own reading of
files goes into the reference. Token ids are those of transformers' tokenizer, checked against llama.cpp's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import torch
import transformers

from numba_engine.checkpoint.demo import fetch_demo
from tests.golden.bf16_directory import write_bf16_directory
from tests.golden.golden import NUM_GREEDY_TOKENS, Golden, save

LONG = """\
Of all the things that a machine can do with a sentence, guessing its next word looks like the least. Yet to
guess well, it has to hold the thread of what was said, to know which names belong to which people, to follow an
argument to where it leads and to notice when the subject has been changed. A clerk who copies letters learns in
time to finish them before the writer does; not because he has been told what they will say, but because he has
seen how such letters go. The engine of this story is such a clerk. It has read a great deal, it forgets nothing
that it can still see, and for every word it writes it walks through all that it knows, from the first page to
the last, exactly once. That is why it is slow: not because the thinking is hard, but because the library is
large, and every book in it must be taken from its shelf and put back for each single word. Give it more clerks
and they will wait in the same corridor. Give it a wider corridor, or smaller books, and"""

PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "plain": "The capital of France is",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return",
    "emoji": "I had 🍕 and 🍣 for dinner 😋 with 👩‍👩‍👧‍👦, then we watched 🎬",
    "spanish": "¿Cuál es la capital de España? La capital de España es la ciudad de",
    "whitespace": " \n\n\t  \n ",
    "one_token": "Hello",
    "long": LONG,
    "chat": [
        {"role": "user", "content": "Name three primary colors."},
        {"role": "assistant", "content": "Red, yellow and blue."},
        {"role": "user", "content": "And what do red and yellow make?"},
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=None, help="the demo model's file; fetched if not given")
    gguf_file = parser.parse_args().gguf or Path(fetch_demo())
    torch.set_num_threads(2)
    source = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, {gguf_file.name}"
    model, tokenizer = load_gguf(gguf_file)
    prompts = {name: token_ids(tokenizer, prompt) for name, prompt in PROMPTS.items()}
    check_token_ids(gguf_file, tokenizer, prompts)
    save(source, [answer(model, name, ids) for name, ids in prompts.items()], name="smollm2")
    with tempfile.TemporaryDirectory() as directory:
        write_bf16_directory(gguf_file, Path(directory))
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        goldens = [answer(model, name, ids) for name, ids in prompts.items()]
    save(f"{source}, weights rounded to bfloat16", goldens, name="smollm2_bf16")


def load_gguf(gguf_file: Path) -> tuple[Any, Any]:
    """transformers' own reading of a GGUF file."""
    folder, name = str(gguf_file.parent), gguf_file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model.eval(), tokenizer


def token_ids(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    text = prompt_text(tokenizer, prompt)
    return list(tokenizer(text, add_special_tokens=isinstance(prompt, str)).input_ids)


def prompt_text(tokenizer: Any, prompt: str | list[dict[str, str]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def check_token_ids(gguf_file: Path, tokenizer: Any, prompts: dict[str, list[int]]) -> None:
    """llama.cpp reads the same file's vocabulary in its own way; where they differ, there is no reference."""
    vocabulary = llama_cpp.Llama(str(gguf_file), vocab_only=True, verbose=False)
    for name, ids in prompts.items():
        text = prompt_text(tokenizer, PROMPTS[name])
        theirs = vocabulary.tokenize(text.encode(), add_bos=False, special=True)
        assert theirs == ids, f"{name}: transformers {ids}, llama.cpp {theirs}"


@torch.inference_mode()
def answer(model: Any, name: str, prompt_ids: list[int]) -> Golden:
    """Greedy decoding, each token from all before it and no cache; the first distribution is kept whole."""
    distributions = []
    tokens: list[int] = []
    margins: list[float] = []
    for _ in range(NUM_GREEDY_TOKENS):
        logits = model(torch.tensor([prompt_ids + tokens]), use_cache=False, logits_to_keep=1).logits
        distributions.append(torch.log_softmax(logits[0, -1].double(), dim=-1))
        best = torch.topk(distributions[-1], 2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 5))
    return Golden(name, PROMPTS[name], prompt_ids, tokens, margins, distributions[0].float().numpy())


if __name__ == "__main__":
    main()
