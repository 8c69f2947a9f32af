"""Which full blocks hold which tokens: found by a chained digest and by comparing the tokens.

The digest of block i covers the salt (of the tenant, and of what its tokens are computed with:
`Request.cache_scope`), all tokens of blocks 0 … i, and how many tokens of each were *computed as
prompt*. The last is there because a compute plane may compute the KV of a prompt's tokens by other
products than that of generated ones: then their bits differ, and a block may only stand in for one
that would have been computed the same way. Where a plane says that it makes no difference, the role
is left out of the digest.

A digest is BLAKE2b of 128 bits (RFC 7693), so that nobody can find two prefixes with the same one;
the tokens of every block are compared all the same, on the whole way from the first block, before
it is shared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple
from weakref import ref

DIGEST_BYTES = 16
COMPARED_AT_ONCE = 64
"""Blocks of two prompts, where they begin alike."""


class BlockContent(NamedTuple):
    """A full block: the digest of everything up to its end, and its own tokens as 32-bit words."""

    digest: bytes
    tokens: bytes


class TokenChain:
    """The full blocks of one sequence, digested as far as they were asked for.

    `prompt` and `output` are the sequence's own lists; the output may grow, nothing may change.
    `num_reached`: blocks that have been looked up, where that was not gone on with to the end.
    """

    __slots__ = (
        "__weakref__",
        "_block_size",
        "_digests",
        "_output",
        "_prompt",
        "_roles_matter",
        "_root",
        "_tokens",
        "num_reached",
    )

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
        self._digests: list[bytes] = []
        self._tokens: list[bytes] = []
        self.num_reached = 0

    @property
    def num_digested(self) -> int:
        """Blocks that have been asked for; of the others the digest is still to be made."""
        return len(self._digests)

    @property
    def roles_matter(self) -> bool:
        """Whether tokens of a prompt are never found for generated ones, nor these for those."""
        return self._roles_matter

    def block(self, index: int) -> BlockContent:
        """Return full block `index`; all its tokens must be known."""
        while len(self._digests) <= index:
            content = self._digest(len(self._digests))
            self._digests.append(content.digest)
            self._tokens.append(content.tokens)
        return BlockContent(self._digests[index], self._tokens[index])

    def take_over(self, other: TokenChain) -> None:
        """Take what another chain has digested, as far as both begin with the same prompt.

        Prompts that begin alike come in bursts, and a digest takes a hundred times as long as to
        see that two blocks are the same.
        """
        size = self._block_size
        if self._root != other._root or size != other._block_size:
            return
        most = min(len(self._prompt) // size, len(other._prompt) // size, len(other._digests))
        num_same = 0
        for step in (COMPARED_AT_ONCE, 1):
            while num_same + step <= most:
                tokens = slice(num_same * size, (num_same + step) * size)
                if self._prompt[tokens] != other._prompt[tokens]:
                    break
                num_same += step
        self._digests = other._digests[:num_same]
        self._tokens = other._tokens[:num_same]

    def fork(self, output: Sequence[int]) -> TokenChain:
        """Return the chain of a sequence with the same prompt and another output."""
        chain = TokenChain.__new__(TokenChain)
        chain._prompt, chain._output = self._prompt, output
        chain._block_size, chain._roles_matter = self._block_size, self._roles_matter
        chain._root, chain.num_reached = self._root, 0
        num_shared = len(self._prompt) // self._block_size
        chain._digests, chain._tokens = self._digests[:num_shared], self._tokens[:num_shared]
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
        parent = self._digests[index - 1] if index else self._root
        role = num_prompt_role if self._roles_matter else 0
        digest = blake2b(
            parent + role.to_bytes(4, "little") + tokens, digest_size=DIGEST_BYTES
        ).digest()
        return BlockContent(digest, tokens)


class PrefixCache:
    """The blocks whose content can be found. It counts no references: that is the pool's part.

    What the last chain found is kept until one of its blocks is removed: a request that waits for
    room is looked up in every step.

    `last_chain`: that chain, as long as its sequence is there.
    """

    __slots__ = ("_blocks", "_digests", "_found", "_last_chain", "_places", "_tokens")

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}  # digest → block
        # Two of bytes, not one of pairs, which the garbage collector would look at one by one.
        self._digests: dict[int, bytes] = {}  # block → digest
        self._tokens: dict[int, bytes] = {}  # block → its tokens
        self._last_chain: ref[TokenChain] | None = None
        self._found: list[int] = []  # of that chain, from its beginning
        self._places: dict[int, int] = {}  # block → where it stands in `_found`

    @property
    def last_chain(self) -> TokenChain | None:
        """See above."""
        return None if self._last_chain is None else self._last_chain()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digests

    def find(self, chain: TokenChain, num_blocks: int) -> list[int]:
        """Return the blocks that hold the longest known beginning of the chain's first blocks."""
        if chain is not self.last_chain:
            self._last_chain = ref(chain)
            self._found, self._places = [], {}
        found = self._found
        for index in range(len(found), num_blocks):
            content = chain.block(index)
            block_id = self._blocks.get(content.digest)
            if block_id is None or self._tokens[block_id] != content.tokens:
                break
            self._places[block_id] = index
            found.append(block_id)
        return found[:num_blocks]

    def add(self, content: BlockContent, block_id: int) -> bool:
        """Make a block findable; False if there is one of that content, or it has another."""
        if content.digest in self._blocks or block_id in self._digests:
            return False
        self._blocks[content.digest] = block_id
        self._digests[block_id], self._tokens[block_id] = content
        return True

    def remove(self, block_id: int) -> bool:
        """Make a block unfindable; whether it could be found."""
        digest = self._digests.pop(block_id, None)
        if digest is None:
            return False
        del self._blocks[digest], self._tokens[block_id]
        place = self._places.get(block_id)
        if place is not None:
            for lost in self._found[place:]:
                del self._places[lost]
            del self._found[place:]
        return True

    def block_ids(self) -> list[int]:
        """Return all blocks that can be found."""
        return list(self._digests)
