"""The ring of host buffers: one for each step that may be under way.

A step writes its inputs into its *berth*'s host buffer, which is copied to the device as one, and
gets its results back into the same berth. Host memory must stay untouched until the device has
copied it, and results until they are read, so a berth is free again only when its step was
collected. Device memory for inputs is one buffer: steps run one after the other on one stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from torch import Tensor

from compute_plane.cuda.columns import ALIGNMENT, Array, Layout
from compute_plane.cuda.drivers import Driver, Event
from compute_plane.cuda.step_times import StepTimes, TimedStep
from compute_plane.errors import DeviceLostError
from planes.errors import ExecutionError

FIRST_BYTES: Final = 1 << 16
"""Of a buffer at first. Host memory that is too little is replaced by at least twice as much, since
pinning takes time; the device's by as little more as can be, since a pool lies beside it."""


class Berth:
    """The host memory of one step under way."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._inputs = driver.host_buffer(FIRST_BYTES)
        self._num_filled = 0
        self._outgrown: list[Tensor] = []  # what the device may still copy from
        self._results = driver.host_buffer(FIRST_BYTES)
        self._device_results: Tensor | None = None
        self._layout: Layout | None = None
        self._done: Event | None = None
        self.is_taken = False

    def device_results(self, num_bytes: int) -> Tensor:
        """Return device memory that is this step's until it is collected, and then the next's."""
        if self._device_results is None or len(self._device_results) < num_bytes:
            self._device_results = self._driver.device_buffer(num_bytes)
        return self._device_results

    def fill_bytes(self, parts: Sequence[Array]) -> tuple[Tensor, int, int]:
        """Write arrays one behind the other into the host buffer.

        Return that, where in it they lie, and how many bytes they are. They lie behind what was
        filled in before: the device may not have copied that yet.
        """
        num_bytes = sum([part.nbytes for part in parts])
        begin, end = self._room(num_bytes), 0
        memory: Array = self._inputs[begin : begin + num_bytes].numpy()
        for part in parts:
            first, end = end, end + part.nbytes
            np.ndarray(part.shape, part.dtype, memory, first)[...] = part
        return self._inputs, begin, num_bytes

    def fill_inputs(self, layout: Layout, arrays: Mapping[str, Array]) -> Tensor:
        """Write arrays into the host buffer, as above; return its bytes."""
        begin = self._room(layout.num_bytes)
        filled = self._inputs[begin : begin + layout.num_bytes]
        layout.fill(filled, arrays)
        return filled

    def _room(self, num_bytes: int) -> int:
        """Return where in the host buffer so many bytes lie that were not filled in yet."""
        first = self._num_filled
        if first + num_bytes > len(self._inputs):
            self._outgrown.append(self._inputs)
            self._inputs, first = self._driver.host_buffer(_grown(self._inputs, num_bytes)), 0
        self._num_filled = first + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return first

    def fetch(self, layout: Layout, results: Tensor, timed: TimedStep | None = None) -> Event:
        """Have the device's results copied here, once all that is queued by now is done.

        Return when that is. `timed`: what is known of when it will be.
        """
        if layout.num_bytes > len(self._results):
            self._results = self._driver.host_buffer(_grown(self._results, layout.num_bytes))
        self._layout = layout
        target, is_watched = (
            self._results[: layout.num_bytes],
            timed is not None and timed.is_watched,
        )
        done = self._driver.download(target, results, is_watched=is_watched)
        self._done = done if timed is None else timed.end(done)
        return self._done

    def collect(self) -> dict[str, Array]:
        """Wait for the results and return them; the berth is free then, also if that fails.

        Raises DeviceLostError.
        """
        if self._done is None or self._layout is None:
            raise RuntimeError("nothing was fetched into this berth")
        try:
            self._done.wait()
        except RuntimeError as error:
            raise _lost(error) from error
        else:
            return self._layout.arrays(self._results[: self._layout.num_bytes])
        finally:
            self.free()

    def abandon(self) -> None:
        """Give the berth of a step that failed back, once the device copies from it no more.

        Raises DeviceLostError if the device will do nothing any more.
        """
        try:
            self._driver.synchronize()
        except RuntimeError as error:
            raise _lost(error) from error
        finally:
            self.free()

    def free(self) -> None:
        """Give the berth back, with nothing fetched."""
        self._done = self._layout = None
        self._num_filled = 0
        self._outgrown.clear()
        self.is_taken = False


class StagingRing:
    """`num_steps` berths, and the device buffer that inputs are copied to.

    `device_bytes`: of that buffer, at first. `times`: what was learned of steps that went by here.
    """

    def __init__(self, driver: Driver, num_steps: int, *, device_bytes: int = FIRST_BYTES) -> None:
        self._driver = driver
        self._berths = [Berth(driver) for _ in range(num_steps)]
        self._device_inputs = driver.device_buffer(_rounded(device_bytes))
        self.times = StepTimes()
        self.num_uploads = 0
        """Uploads so far: what the last one brought is there while this stays."""

    def take(self) -> Berth:
        """Return a free berth. Raises ExecutionError if the step of none was collected."""
        berth = next((berth for berth in self._berths if not berth.is_taken), None)
        if berth is None:
            raise ExecutionError(
                f"at most {len(self._berths)} steps may be under way; collect the oldest first"
            )
        berth.is_taken = True
        return berth

    def upload(
        self,
        berth: Berth,
        layout: Layout,
        arrays: Mapping[str, Array],
        rooms: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, Tensor]:
        """Copy arrays to the device in one go; return them as tensors there.

        `rooms`: int32 tensors of these shapes are returned as well, in which anything lies. All are
        valid until the next upload is queued.
        """
        self.num_uploads += 1
        filled = berth.fill_inputs(layout, arrays)
        beside = Layout({name: (np.int32, shape) for name, shape in (rooms or {}).items()})
        num_bytes = layout.num_bytes + beside.num_bytes
        if num_bytes > len(self._device_inputs):
            self._device_inputs = self._driver.device_buffer(_rounded(num_bytes))
        inputs = self._device_inputs[: layout.num_bytes]
        self._driver.copy(inputs, filled)
        tensors = layout.tensors(inputs)
        if rooms:
            tensors |= beside.tensors(self._device_inputs[layout.num_bytes : num_bytes])
        return tensors


def _lost(error: RuntimeError) -> DeviceLostError:
    """Return what a device reports to those who wait for it: queued work fails for good."""
    return DeviceLostError(f"nothing runs on the device any more: {' '.join(str(error).split())}")


def _rounded(num_bytes: int) -> int:
    """Return the size of the device's buffer for so many bytes."""
    return -(-num_bytes // FIRST_BYTES) * FIRST_BYTES


def _grown(buffer: Tensor, num_bytes: int) -> int:
    """Return the size of the buffer that replaces one that is too small."""
    return max(2 * len(buffer), num_bytes)
