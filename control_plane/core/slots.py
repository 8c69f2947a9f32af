"""Which slots of the compute plane are in use, and which it must still be told to forget."""

from __future__ import annotations


class SlotPool:
    """The slots `0 … num_slots − 1`.

    A released slot may be given out again at once: the batch that starts it lists it as released
    too, or an earlier one did, and the compute plane applies `released` before `starts`.
    """

    __slots__ = ("_free", "_num_slots", "_to_forget")

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free: list[int] = []
        self._to_forget: list[int] = []
        self.reset()

    @property
    def num_slots(self) -> int:
        """All slots there are."""
        return self._num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be acquired."""
        return len(self._free)

    def reset(self) -> None:
        """Make every slot free; the compute plane has forgotten them all."""
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._to_forget = []

    def acquire(self) -> int:
        """Take a free slot; there must be one."""
        return self._free.pop()

    def release(self, slot: int, *, was_started: bool) -> None:
        """Give a slot back; if it was started, the next batch tells the compute plane."""
        self._free.append(slot)
        if was_started:
            self._to_forget.append(slot)

    def take_released(self) -> tuple[int, ...]:
        """Return the slots the next batch lists as released; each is given here once."""
        released = tuple(self._to_forget)
        self._to_forget.clear()
        return released
