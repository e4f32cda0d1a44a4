"""ModelConfig from config.json and from GGUF metadata: every variant that is read, and every one that is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numba_engine.backends.layers import Attention
from numba_engine.checkpoint import open_checkpoint
from numba_engine.checkpoint.checkpoint import Checkpoint
from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.formats import F32, StoredTensor, quantize
from numba_engine.model.config import (
    QK_NORMS,
    QKV_BIAS,
    LayerConfig,
    ModelConfig,
    RopeFrequencyDivisors,
    RopeParameters,
)
from numba_engine.model.read_config import default_sampling, read_config
from numba_engine.model.rope import inverse_frequencies
from numba_engine.sampling_params import SamplingParams
from tests.tiny_models import BOS_TOKEN_ID, EOS_TOKEN_ID, LLAMA3_ROPE, TinyModel, hf_config, write_gguf, write_hf

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def hf_checkpoint(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> Checkpoint:
    return Checkpoint("hf", Path("dir"), name="x", config=config, generation_config=generation_config or {}, tensors={})


def read_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    return read_config(hf_checkpoint(config, generation_config))


def expected(model: TinyModel) -> ModelConfig:
    layer = LayerConfig(
        attention=Attention(
            model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim**-0.5, model.sliding_window
        ),
        rope=RopeParameters(model.rope_theta, model.rope_scaling),
        intermediate_size=model.intermediate_size,
        optional_tensors={"qwen2": QKV_BIAS, "qwen3": QK_NORMS}.get(model.architecture, frozenset()),
    )
    return ModelConfig(
        architecture=model.architecture,
        hidden_size=model.hidden_size,
        layers=(layer,) * model.num_layers,
        vocab_size=model.vocab_size,
        max_position=model.max_position,
        rms_norm_eps=model.rms_norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_ids=(EOS_TOKEN_ID,),
    )


MODELS = [
    *(TinyModel(architecture) for architecture in ARCHITECTURES),
    TinyModel("llama", rope_scaling=LLAMA3_ROPE, rope_theta=500000.0, tie_word_embeddings=True),
    TinyModel("mistral", sliding_window=7, num_heads=8, num_kv_heads=1, head_dim=80),
    TinyModel("qwen2", sliding_window=12),
    TinyModel("qwen3", num_layers=3, num_heads=6, num_kv_heads=2, head_dim=128, max_position=40960),
]


@pytest.mark.parametrize("rope_parameters", [False, True], ids=["rope_theta", "rope_parameters"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.architecture)
def test_hugging_face_configs(model: TinyModel, rope_parameters: bool) -> None:
    assert read_hf(hf_config(model, rope_parameters=rope_parameters)) == expected(model)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.architecture)
def test_gguf_metadata(tmp_path: Path, model: TinyModel) -> None:
    with open_checkpoint(str(write_gguf(tmp_path / "x.gguf", model))) as checkpoint:
        config = read_config(checkpoint)
    wanted = expected(model)
    rope, wanted_rope = config.layers[0].rope, wanted.layers[0].rope
    assert rope is not None
    assert wanted_rope is not None
    assert config.rms_norm_eps == pytest.approx(wanted.rms_norm_eps, rel=1e-7)
    assert isinstance(rope.scaling, RopeFrequencyDivisors) == (model.rope_scaling is not None)
    assert inverse_frequencies(rope, model.head_dim) == pytest.approx(
        inverse_frequencies(wanted_rope, model.head_dim), rel=1e-6
    )
    assert config == replace(
        wanted,
        architecture="llama" if model.architecture == "mistral" else model.architecture,
        rms_norm_eps=config.rms_norm_eps,
        layers=tuple(replace(layer, rope=replace(wanted_rope, scaling=rope.scaling)) for layer in wanted.layers),
    )


def test_the_demo_model(demo_path: Path) -> None:
    with open_checkpoint(str(demo_path)) as checkpoint:
        config = read_config(checkpoint)
    assert config.layers == 30 * (
        LayerConfig(
            attention=Attention(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, window=None, softcap=None),
            rope=RopeParameters(theta=100000.0, scaling=None),
            intermediate_size=1536,
            activation="silu",
            optional_tensors=frozenset(),
            residual_scale=1.0,
        ),
    )
    assert asdict(replace(config, layers=())) == {
        "architecture": "llama",
        "hidden_size": 576,
        "layers": (),
        "vocab_size": 49152,
        "max_position": 8192,
        "rms_norm_eps": pytest.approx(1e-5, rel=1e-6),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_ids": (2, 0),  # <|im_end|>, and <|endoftext|> as llama.cpp has it
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "logit_softcap": None,
    }
    assert config.layers[0].attention.group_size == 3
    assert config.kv_values_per_token == 30 * 2 * 3 * 64


# ---- what may be left out --------------------------------------------------------------------------------------------


def without(model: TinyModel, *names: str, **changes: Any) -> ModelConfig:
    config = hf_config(model) | changes
    return read_hf({key: value for key, value in config.items() if key not in names})


def first_shape(config: ModelConfig) -> Attention:
    return config.layers[0].attention


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


def test_head_dim_defaults_to_the_hidden_size_shared_out() -> None:
    assert first_shape(without(TinyModel(), "head_dim")).head_dim == 16
    assert first_shape(without(TinyModel(), head_dim=None)).head_dim == 16
    assert first_shape(without(TinyModel("qwen3"), "head_dim")).head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "num_heads", "num_kv_heads"), [("llama", 4, 4), ("mistral", 16, 8), ("qwen2", 64, 32)]
)
def test_missing_kv_heads_take_transformers_default(architecture: str, num_heads: int, num_kv_heads: int) -> None:
    model = TinyModel(architecture, num_heads=num_heads)
    assert first_shape(without(model, "num_key_value_heads")).num_kv_heads == num_kv_heads
    assert first_shape(without(model, num_key_value_heads=None)).num_kv_heads == num_heads


def test_other_defaults() -> None:
    names = ("rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    config = without(TinyModel("mistral"), *names, "hidden_act", "bos_token_id", "eos_token_id", "sliding_window")
    assert config.layers[0].rope == RopeParameters(10000.0)
    assert (config.rms_norm_eps, config.max_position) == (1e-6, 131072)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (False, None, ())
    assert windows(config) == [4096, 4096]


def test_model_type_stands_in_for_architectures() -> None:
    assert without(TinyModel("qwen2"), "architectures").architecture == "qwen2"


@pytest.mark.parametrize(
    ("changes", "expected_windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 9}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": None}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, [None, 9]),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, [9, 9]),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 2}, [9, 9]),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"] * 2}, [None, None]),
        (
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
            [9, None],
        ),
    ],
)
def test_qwen_windows(changes: dict[str, Any], expected_windows: list[int | None]) -> None:
    assert windows(without(TinyModel("qwen3"), **changes)) == expected_windows


def test_end_tokens_of_both_files_count() -> None:
    config = hf_config(TinyModel()) | {"eos_token_id": [5, 2]}
    assert read_hf(config, {"eos_token_id": [7, 5]}).eos_token_ids == (7, 5, 2)
    assert read_hf(config, {"eos_token_id": 9}).eos_token_ids == (9, 5, 2)
    assert read_hf(config | {"eos_token_id": None}, {"eos_token_id": 9}).eos_token_ids == (9,)


def test_gguf_end_tokens() -> None:
    tokens = ["<s>", "<|im_end|>", "<|eot_id|>", "</s>", "<|im_end|>", "x"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 3, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eom_token_id": 5,
    }
    # 1 ends an answer too, though the file types it as text
    assert read_gguf(metadata, vocab_size=6).eos_token_ids == (3, 5, 1, 2, 4)


def test_ids_of_no_token_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = without(TinyModel(), bos_token_id=331, eos_token_id=[2, -1, "</s>"])
    assert (config.bos_token_id, config.eos_token_ids) == (None, (2,))
    assert "dir/config.json: bos_token_id = 331 names no token of the 331 there are; ignored" in caplog.messages
    assert any("eos_token_id = [2, -1, '</s>'] names no token" in message for message in caplog.messages)
    assert read_gguf({"tokenizer.ggml.eos_token_id": 331}).eos_token_ids == ()
    assert any("tokenizer.ggml.eos_token_id = 331 names" in message for message in caplog.messages)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "changes", "field", "value"),
    [
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "architectures", "GemmaForCausalLM"),
        ("llama", {"architectures": None, "model_type": "phi3"}, "model_type", "phi3"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ("llama", {"attention_bias": True}, "attention_bias", True),
        ("qwen3", {"attention_bias": True}, "attention_bias", True),
        ("llama", {"mlp_bias": True}, "mlp_bias", True),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method", "gptq"),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method", "fp8"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "yarn"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type", "linear"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type", "dynamic"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type", "longrope"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor", 0.25),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e6}},
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", 5]},
            "layer_types",
            ["full_attention", 5],
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["chunked_attention"] * 2},
            "layer_types",
            ["chunked_attention"] * 2,
        ),
    ],
)
def test_what_is_not_supported_is_named(architecture: str, changes: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"dir/config\.json: .* is not supported; supported: ") as raised:
        without(TinyModel(architecture), **changes)
    assert (raised.value.field, raised.value.value) == (field, value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": []}, "architectures must be a list of one name"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of one name"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1 to 1048576, got 0"),
        ({"hidden_size": -64}, "hidden_size must be"),
        ({"hidden_size": 64.0}, "hidden_size must be"),
        ({"hidden_size": True}, "hidden_size must be"),
        ({"hidden_size": "64"}, "hidden_size must be"),
        ({"hidden_size": 2**40}, "hidden_size must be"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be"),
        ({"vocab_size": 2**31}, "vocab_size must be"),
        ({"intermediate_size": [96]}, "intermediate_size must be"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings must be"),
        ({"num_attention_heads": 5}, "5 attention heads cannot share 2 key-value heads"),
        ({"num_attention_heads": 5, "head_dim": None}, "hidden_size = 64 is not a multiple of num_attention_heads = 5"),
        ({"head_dim": 15}, "head_dim = 15 must be even"),
        ({"head_dim": 4096}, "head_dim must be"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"rope_theta": math.inf}, "rope_theta must be a number"),
        ({"rope_theta": 0}, "rope_theta must be a number"),
        ({"rope_theta": 10**400}, "rope_theta must be a number"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling\.factor is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_numbers_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as raised:
        without(TinyModel(), **changes)
    assert raised.value.file == "dir/config.json"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"factor": 0.5}, r"rope_scaling\.factor must be a number from 1"),
        ({"low_freq_factor": 4.0}, "high_freq_factor = 4.0 must exceed low_freq_factor = 4.0"),
        ({"original_max_position_embeddings": 64.5}, "original_max_position_embeddings must be an integer"),
    ],
)
def test_llama3_scaling_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    config = hf_config(TinyModel(rope_scaling=LLAMA3_ROPE))
    with pytest.raises(CheckpointError, match=says):
        read_hf(config | {"rope_scaling": config["rope_scaling"] | changes})


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_values_are_read_or_refused(data: st.DataObject) -> None:
    config = hf_config(TinyModel(data.draw(st.sampled_from(ARCHITECTURES)), rope_scaling=LLAMA3_ROPE))
    names = [*config, "layer_types", "use_sliding_window", "quantization_config", "rope_parameters", "attention_bias"]
    values = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=True, allow_infinity=True),
        st.text(max_size=5),
        st.lists(st.integers(-3, 400) | st.text(max_size=3), max_size=3),
        st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "type"]), st.none() | st.integers()),
    )
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        config[name] = data.draw(values)
    try:
        model = read_hf(config, {"eos_token_id": data.draw(values)})
    except CheckpointError:
        return
    for layer in model.layers:
        assert layer.attention.num_heads % layer.attention.num_kv_heads == 0
        assert layer.attention.head_dim % 2 == 0
        assert layer.intermediate_size >= 1
    assert min(model.hidden_size, model.num_layers, model.max_position) >= 1
    assert all(0 <= token_id < model.vocab_size for token_id in model.eos_token_ids)


# ---- GGUF: what is refused -------------------------------------------------------------------------------------------


def read_gguf(
    changes: Mapping[str, Any] | None = None,
    *,
    vocab_size: int = 331,
    tensors: Mapping[str, StoredTensor] | None = None,
) -> ModelConfig:
    """The configuration of a llama of 2 layers whose metadata is changed; None removes a key."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.context_length": 512,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **(changes or {}),
    }
    embedding = StoredTensor("token_embd.weight", F32, (vocab_size, 64), data=None)  # type: ignore[arg-type]
    stored = {"token_embd.weight": embedding, **(tensors or {})}
    checkpoint = Checkpoint(
        "gguf",
        Path("x.gguf"),
        name="x",
        config={key: value for key, value in metadata.items() if value is not None},
        generation_config={},
        tensors={},
    )
    checkpoint.tensors = stored
    return read_config(checkpoint)


def test_gguf_defaults() -> None:
    config = read_gguf()
    assert (first_shape(config).num_kv_heads, first_shape(config).head_dim, config.vocab_size) == (4, 16, 331)
    assert config.layers[0].rope == RopeParameters(10000.0)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (True, None, ())


def test_gguf_neutral_values_are_accepted() -> None:
    neutral = {
        "llama.expert_count": 0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 1.0,
        "llama.attention.causal": True,
        "llama.logit_scale": 1.0,
        "llama.attention.sliding_window": 0,
        "llama.attention.head_count": [4, 4],
        "llama.feed_forward_length": [96, 96],
        "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16,
    }
    assert read_gguf(neutral) == read_gguf()


def test_gguf_layers_may_differ_in_heads_and_sizes() -> None:
    config = read_gguf(
        {
            "llama.attention.head_count": [4, 6],
            "llama.attention.head_count_kv": [1, 3],
            "llama.feed_forward_length": [96, 32],
        }
    )
    first, second = config.layers
    assert (first.attention.num_heads, first.attention.num_kv_heads, first.intermediate_size) == (4, 1, 96)
    assert (second.attention.num_heads, second.attention.num_kv_heads, second.intermediate_size) == (6, 3, 32)
    assert (first.attention.head_dim, second.attention.head_dim) == (16, 16)
    assert config.kv_values_per_token == 2 * (1 + 3) * 16


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"general.architecture": "gemma2"}, "general.architecture", "gemma2"),
        ({"general.architecture": None}, "general.architecture", None),
        ({"general.architecture": 5}, "general.architecture", 5),
        ({"llama.expert_count": 8}, "llama.expert_count", 8),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type", "yarn"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            "llama.rope.scaling.factor",
            4.0,
        ),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor", 4.0),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear", 2.0),
        ({"llama.attention.causal": False}, "llama.attention.causal", False),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping", 30.0),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length", 32),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count", 8),
    ],
)
def test_gguf_what_is_not_supported_is_named(changes: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"x\.gguf: .* is not supported; supported: ") as raised:
        read_gguf(changes)
    assert (raised.value.field, raised.value.value) == (field, value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 2**31}, "llama.block_count must be an integer"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length must be an integer"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count must be an integer"),
        ({"llama.attention.head_count": [4]}, "must be a count, or a list of 2"),
        ({"llama.attention.head_count": []}, "must be a count, or a list of 2"),
        ({"llama.attention.head_count": 5}, "embedding_length = 64 is not a multiple of head_count = 5"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
        (
            {"llama.attention.head_count": [4, 6], "llama.attention.head_count_kv": 4},
            "6 attention heads cannot share 4",
        ),
        ({"llama.feed_forward_length": [96, "x"]}, "feed_forward_length must be an integer from 1 to 1048576, got 'x'"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon must be a number"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base must be a number"),
        ({"llama.rope.dimension_count": "16"}, "llama.rope.dimension_count must be an integer"),
        ({"tokenizer.ggml.tokens": ["a"] * 330}, "tokenizer.ggml.tokens has 330 tokens, token_embd.weight 331 rows"),
    ],
)
def test_gguf_numbers_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_gguf(changes)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1.0] * 7, r"has shape \(7,\), head_dim asks for \(8,\)"),
        ([1.0] * 7 + [0.0], "must hold positive numbers"),
        ([math.nan] * 8, "must hold positive numbers"),
        ([-1.0] * 8, "must hold positive numbers"),
    ],
)
def test_gguf_rope_divisors_that_cannot_be(values: list[float], says: str) -> None:
    tensor = quantize("rope_freqs.weight", values, F32)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=says) as raised:
        read_gguf(tensors={"rope_freqs.weight": tensor})
    assert raised.value.tensor == "rope_freqs.weight"


def test_gguf_without_an_embedding(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for key, value in (("block_count", 2), ("embedding_length", 64), ("attention.head_count", 4)):
        writer.add_uint32(f"llama.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with (
        open_checkpoint(str(tmp_path / "x.gguf")) as checkpoint,
        pytest.raises(CheckpointError, match=r"tensor 'token_embd\.weight': is missing"),
    ):
        read_config(checkpoint)


# ---- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation_config", "wanted"),
    [
        ({}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"min_p": 0.05, "repetition_penalty": 1.1}, {"min_p": 0.05, "repetition_penalty": 1.1}),
        ({"temperature": 1, "top_k": 0}, {"temperature": 1, "top_k": 0}),
        ({"temperature": None, "top_p": "0.9", "top_k": 2.5, "min_p": True}, {}),
        ({"temperature": -1, "top_p": 0, "top_k": -1, "min_p": 2, "repetition_penalty": 0}, {}),
        ({"temperature": math.nan, "top_p": math.inf, "top_k": 2**40, "repetition_penalty": 10**400}, {}),
        ({"temperature": [1], "top_p": {}, "max_new_tokens": 5, "eos_token_id": 2}, {}),
    ],
)
def test_sampling_defaults_of_the_model(generation_config: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = default_sampling(hf_checkpoint({}, generation_config))
    assert found == wanted
    SamplingParams(**found)


def test_sampling_defaults_of_a_gguf_file() -> None:
    metadata = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05}
    checkpoint = Checkpoint("gguf", Path("x"), name="x", config=metadata, generation_config={}, tensors={})
    assert default_sampling(checkpoint) == {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}


@given(st.dictionaries(st.sampled_from(["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]), st.floats()))
def test_sampling_defaults_are_always_usable(generation_config: dict[str, float]) -> None:
    SamplingParams(**default_sampling(hf_checkpoint({}, generation_config)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers())
def test_integers_of_any_size_are_usable_or_left_out(top_k: int) -> None:
    SamplingParams(**default_sampling(hf_checkpoint({}, {"top_k": top_k, "temperature": top_k})))


def test_files_round_trip(tmp_path: Path) -> None:
    model = TinyModel("qwen3", tie_word_embeddings=True)
    write_hf(tmp_path, model, generation_config={"temperature": 0.6, "eos_token_id": [2, 1]})
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert read_config(checkpoint) == replace(expected(model), eos_token_ids=(2, 1))
        assert default_sampling(checkpoint) == {"temperature": 0.6}
