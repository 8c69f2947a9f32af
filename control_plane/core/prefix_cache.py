"""Which full blocks hold which tokens: found by a chained digest and by comparing the tokens.

The digest of block i covers the salt of the tenant, all tokens of blocks 0 … i, and how many tokens
of each were *computed as prompt*. The last is there because a compute plane may compute the KV of a
prompt's tokens by other products than that of generated ones: then their bits differ, and a block
may only stand in for one that would have been computed the same way. Where a plane says that it
makes no difference, the role is left out of the digest.

A digest is BLAKE2b of 128 bits (RFC 7693), so that nobody can find two prefixes with the same one;
the tokens of every block are compared all the same, on the whole way from the first block, before
it is shared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


class BlockContent(NamedTuple):
    """A full block: the digest of everything up to its end, and its own tokens as 32-bit words."""

    digest: bytes
    tokens: bytes


class TokenChain:
    """The full blocks of one sequence, digested as far as they were asked for.

    `prompt` and `output` are the sequence's own lists; the output may grow, nothing may change.
    """

    __slots__ = ("_block_size", "_contents", "_output", "_prompt", "_roles_matter", "_root")

    def __init__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        block_size: int,
        roles_matter: bool,
        salt: str = "",
    ) -> None:
        self._prompt = prompt
        self._output = output
        self._block_size = block_size
        self._roles_matter = roles_matter
        self._root = blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()
        self._contents: list[BlockContent] = []

    @property
    def roles_matter(self) -> bool:
        """Whether tokens of a prompt are never found for generated ones, nor these for those."""
        return self._roles_matter

    def block(self, index: int) -> BlockContent:
        """Return full block `index`; all its tokens must be known."""
        contents = self._contents
        while len(contents) <= index:
            contents.append(self._digest(len(contents)))
        return contents[index]

    def fork(self, output: Sequence[int]) -> TokenChain:
        """Return the chain of a sequence with the same prompt and another output."""
        chain = TokenChain.__new__(TokenChain)
        chain._prompt, chain._output = self._prompt, output
        chain._block_size, chain._roles_matter = self._block_size, self._roles_matter
        chain._root = self._root
        chain._contents = self._contents[: len(self._prompt) // self._block_size]
        return chain

    def _digest(self, index: int) -> BlockContent:
        size, num_prompt = self._block_size, len(self._prompt)
        first = index * size
        end = first + size
        words = array("I", self._prompt[first:end])
        num_prompt_role = len(words)
        if num_prompt_role < size:
            words.extend(self._output[max(0, first - num_prompt) : end - num_prompt])
        if len(words) != size:
            raise IndexError(f"block {index} of {size} tokens is not full yet")
        tokens = words.tobytes()
        parent = self._contents[index - 1].digest if index else self._root
        role = num_prompt_role if self._roles_matter else 0
        digest = blake2b(
            parent + role.to_bytes(4, "little") + tokens, digest_size=DIGEST_BYTES
        ).digest()
        return BlockContent(digest, tokens)


class PrefixCache:
    """The blocks whose content can be found. It counts no references: that is the pool's part."""

    __slots__ = ("_blocks", "_contents")

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}  # digest → block
        self._contents: dict[int, BlockContent] = {}  # block → what is in it

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._contents

    def find(self, chain: TokenChain, num_blocks: int) -> list[int]:
        """Return the blocks that hold the longest known beginning of the chain's first blocks."""
        found: list[int] = []
        for index in range(num_blocks):
            content = chain.block(index)
            block_id = self._blocks.get(content.digest)
            if block_id is None or self._contents[block_id].tokens != content.tokens:
                break
            found.append(block_id)
        return found

    def add(self, content: BlockContent, block_id: int) -> bool:
        """Make a block findable; False if there is one of that content, or it has another."""
        if content.digest in self._blocks or block_id in self._contents:
            return False
        self._blocks[content.digest] = block_id
        self._contents[block_id] = content
        return True

    def remove(self, block_id: int) -> bool:
        """Make a block unfindable; whether it could be found."""
        content = self._contents.pop(block_id, None)
        if content is None:
            return False
        del self._blocks[content.digest]
        return True

    def block_ids(self) -> list[int]:
        """Return all blocks that can be found."""
        return list(self._contents)
