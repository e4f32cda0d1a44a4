"""BlockManager: which KV block belongs to whom, and which full blocks can be shared (prefix caching).

A block is *referenced* by the sequences that have it in their block table. An unreferenced block is free; if it is full
and its tokens are known it stays findable until it is taken for something else, least recently used first. A full block
is known by the hash of its tokens chained to its parent's hash, so equal hashes mean equal whole prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from numba_engine.scheduling.sequence import Sequence


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, cached but unreferenced ones included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence blocks for all its tokens, reusing cached ones. False and no change if too few."""
        assert not sequence.block_table
        cached = self._cached_prefix(sequence)
        num_new = self.blocks_for(len(sequence)) - len(cached)
        num_free_after_sharing = len(self._free) - sum(self._ref_counts[block] == 0 for block in cached)
        if num_new > num_free_after_sharing:
            return False
        for block in cached:
            self._reference(block)
        sequence.block_table = cached + [self._take() for _ in range(num_new)]
        sequence.num_computed_tokens = len(cached) * self.block_size
        return True

    def grow(self, sequence: Sequence, num_unseen: int = 0) -> bool:
        """Make room for the sequence's last token, and for so many that are to come; False if a block is needed and
        none is free."""
        if self.blocks_for(len(sequence) + num_unseen) <= len(sequence.block_table):
            return True
        if not self._free:
            return False
        sequence.block_table.append(self._take())
        return True

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's blocks back. Its last blocks become the first to be reused: prefixes are shared more."""
        for block in reversed(sequence.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of_block:
                    self._free.move_to_end(block, last=False)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def publish(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Make the blocks findable that are full by the last so many tokens computed."""
        first = (sequence.num_computed_tokens - num_new_tokens) // self.block_size
        num_full = sequence.num_computed_tokens // self.block_size
        if not self._prefix_caching or first == num_full:
            return
        self._hash_blocks(sequence, num_full)
        for block, block_hash in zip(
            sequence.block_table[first:num_full], sequence.block_hashes[first:num_full], strict=True
        ):
            if block not in self._hash_of_block and block_hash not in self._block_of_hash:
                self._block_of_hash[block_hash] = block
                self._hash_of_block[block] = block_hash

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks that hold the sequence's first tokens; its last token is always left to compute."""
        if not self._prefix_caching:
            return []
        num_full = (len(sequence) - 1) // self.block_size
        self._hash_blocks(sequence, num_full)
        cached: list[int] = []
        for block_hash in sequence.block_hashes[:num_full]:
            block = self._block_of_hash.get(block_hash)
            if block is None:
                break
            cached.append(block)
        return cached

    def _hash_blocks(self, sequence: Sequence, num_full: int) -> None:
        """Extend the sequence's chained hashes. Cryptographic: a client cannot make two prefixes collide."""
        hashes = sequence.block_hashes
        while len(hashes) < num_full:
            first = len(hashes) * self.block_size
            tokens = array("i", sequence.token_ids[first : first + self.block_size])
            parent = hashes[-1] if hashes else b""
            hashes.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())

    def _reference(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        block_hash = self._hash_of_block.pop(block, None)
        if block_hash is not None:
            del self._block_of_hash[block_hash]
        self._ref_counts[block] = 1
        return block
