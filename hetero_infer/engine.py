"""The engine as a Python object: the control plane in this process, a compute plane beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import structlog

from control_plane.core.embedding_params import EmbeddingParams, TextEmbedding, inputs_of
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import MemoryStats
from control_plane.core.request_options import RequestOptions
from control_plane.engine.bring_up import RETRY_PAUSE_S, ConnectedPlane, learn, make_loop
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.embedding import MAX_AT_ONCE, EmbeddingDesk
from control_plane.engine.events import RequestInfo, RequestUpdate
from control_plane.engine.loop import EngineLoop, LoopOptions
from control_plane.engine.plugins import CoreFactories, KVCacheFactory, SchedulerFactory
from control_plane.engine.recording import Recorder
from control_plane.errors import EngineStoppedError, LinkError, QueueFullError
from control_plane.telemetry import EngineMetrics
from control_plane.text.tokenizer import Tokenizer
from hetero_infer.completed import CompletedRequest, Pending
from hetero_infer.compute_beside import ComputeBeside
from hetero_infer.config import EngineConfig
from hetero_infer.embedding_run import EmbeddingRun
from planes.errors import ConfigError, ValidationError
from planes.logs import configure_logging


class InferenceEngine:
    """Generates text for many prompts at once.

    `config`: None takes every default. `tokenizer`: an object with the methods of
    `hetero_infer.Tokenizer`, in place of the model's. `executor`: `auto`, `cpu`, `cuda`,
    `simulated`, or your own as `module:attribute`, in place of the one in `config`; the compute
    plane, a process of its own, imports it and calls it with an `ExecutorContext`.

        # my_module.py, on the import path or in the working directory
        def make(context: ExecutorContext) -> GPUExecutor:
            return MyExecutor(context)  # has execute, capture_decode_graph and execute_graph

        InferenceEngine(config, executor="my_module:make", tokenizer=MyTokenizer())

    `scheduler`, `kv_cache`: what is called in place of `hetero_infer.Scheduler` and
    `hetero_infer.KVCacheManager`, with the same arguments, or its name, `module:attribute`; both
    live in this process. What they return must have the methods of
    `hetero_infer.SchedulerProtocol` and `hetero_infer.KVCacheManagerProtocol`.

    The engine belongs to the thread that uses it: nothing is computed but in `step` and `run`.
    `close`, the end of a `with` block, or the end of the program ends the compute plane.

    Raises ConfigError for bad values, PlaneStartError if the compute plane cannot start.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        executor: str | None = None,
        scheduler: SchedulerFactory | str | None = None,
        kv_cache: KVCacheFactory | str | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        if executor is not None and isinstance(config, EngineConfig):
            config = dataclasses.replace(config, executor=executor)
        _check(config, tokenizer)
        factories = CoreFactories.load(
            scheduler or config.scheduler, kv_cache or config.kv_cache_manager
        )
        self._config = config
        self._pid = os.getpid()
        self._pending: dict[int, Pending] = {}
        self._completed: list[CompletedRequest] = []
        self._embedding: EmbeddingRun | None = None
        if not structlog.is_configured():
            configure_logging(
                plane="control",
                level=config.log_level,
                log_format=config.log_format,
                owns_process=False,
            )
        with contextlib.ExitStack() as resources:
            recorder = None
            if config.record is not None:
                recorder = Recorder(config.record)
                resources.callback(recorder.close)
            self._compute = ComputeBeside(config)
            resources.callback(self._compute.close)
            self._client = ComputeClient(
                self._compute.address, controller=f"pid {os.getpid()}", recorder=recorder
            )
            resources.callback(self._client.shut_down)
            connected = self._connect(tokenizer)
            self._plane, self._tokenizer = connected.plane, connected.tokenizer
            self._admission = connected.make_admission()
            self._desk = EmbeddingDesk(
                self._admission, connected.plane, text_end=connected.text_end,
                pooling=config.pooling,
            )  # fmt: skip
            self._grammars = connected.make_grammars()
            self._loop = self._make_loop(connected, factories)
            resources.callback(self._loop.close)
            # Runs at `close`, and at the latest when the program ends.
            self._finalizer = weakref.finalize(
                self, _close_in_process, self._pid, resources.pop_all()
            )

    def _connect(self, tokenizer: Tokenizer | None) -> ConnectedPlane:
        """Learn what the compute plane is. Raises ExecutionError if it keeps dying before that."""
        while True:
            try:
                return learn(self._client, self._config, tokenizer)
            except LinkError:
                time.sleep(RETRY_PAUSE_S)
                self._compute.keep_alive(is_known=False)

    def _make_loop(self, connected: ConnectedPlane, factories: CoreFactories) -> EngineLoop:
        publish = weakref.WeakMethod(self._take)

        def publish_if_alive(updates: Sequence[RequestUpdate]) -> None:
            take = publish()
            if take is not None:
                take(updates)

        return make_loop(
            self._client,
            connected,
            publish_if_alive,
            options=LoopOptions(
                pipeline_depth=self._config.pipeline_depth,
                max_queued_requests=self._config.max_queued_requests,
                compute_grace_s=self._config.compute_grace,
            ),
            factories=factories,
        )

    @property
    def config(self) -> EngineConfig:
        """The configuration in use."""
        return self._config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in use."""
        return self._tokenizer

    def submit_request(
        self,
        prompt: str | Sequence[int],
        params: GenerationParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        model: str = "",
    ) -> int:
        """Take a prompt, text or token ids, and return the request's id; nothing is computed yet.

        `priority`: lower ones are served first. `cache_salt`: only requests of the same salt share
        cached prompts. `model`: the one that is loaded or an adapter of it; empty: the former.

        Raises ValidationError, ModelNotFoundError or TokenizationError for what is wrong with it,
        MemoryError if the block pool could not hold it even alone, SchedulerError when
        `max_queued_requests` wait already. What is refused is in no count.
        """
        self._check_open()
        params = GenerationParams() if params is None else params
        if not isinstance(params, GenerationParams):
            raise ValidationError(
                f"params must be GenerationParams, got {params!r:.100}", field="params"
            )
        params.validate()
        num_waiting = self._loop.metrics.waiting_requests + len(self._loop.inbox)
        if num_waiting >= self._config.max_queued_requests:
            raise QueueFullError(
                f"{num_waiting} requests wait, at most max_queued_requests "
                f"({self._config.max_queued_requests}) may; run some first"
            )
        adapter = self._plane.adapter_of(model or self._plane.model)
        token_ids = self._admission.tokenize(prompt) if isinstance(prompt, str) else prompt
        request = self._admission.make_request(
            token_ids,
            params,
            arrival_time=time.monotonic(),
            options=RequestOptions(priority, cache_salt, adapter=adapter),
        )
        if params.structured_outputs is not None:
            request.constraints = self._grammars.constrain(request).result()
        inbox = self._loop.inbox
        self._pending[request.id] = Pending(
            request, self._tokenizer, functools.partial(inbox.end_sample, request.id)
        )
        self._loop.inbox.submit(request)
        return request.id

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        model: str = "",
    ) -> list[TextEmbedding]:
        """Return an embedding of each input, text or token ids, in their order.

        `dimensions`: the first so many numbers; None: all. `normalize`: to a length of 1.
        The others as of `submit_request`. Runs the engine; what ends meanwhile of requests that
        were submitted comes with the next `step` or `run`.

        Raises as `submit_request`, RequestFailedError, and as `run`.
        """
        self._check_open()
        params, desk, given = EmbeddingParams(dimensions, normalize), self._desk, inputs_of(inputs)
        desk.check(given, params)
        adapter = self._plane.adapter_of(model or self._plane.model)
        options = RequestOptions(priority, cache_salt, adapter=adapter)
        requests = desk.make_requests(desk.tokens_of(given), options, arrival_time=time.monotonic())
        # No more than may wait: none is refused because of the others.
        most = min(MAX_AT_ONCE, self._config.max_queued_requests)
        run = self._embedding = EmbeddingRun(requests, self._loop.inbox, max_at_once=most)
        try:
            while not run.is_over:
                self._check_open()
                run.submit_some()
                self._advance()
        finally:
            self._embedding = None
            run.leave()
        return run.embeddings(params)

    def cancel_request(self, request_id: int) -> None:
        """Ask for the end of a request; it ends as cancelled in a later `step`."""
        self._check_open()
        self._loop.inbox.cancel(request_id)

    def step(self) -> list[CompletedRequest]:
        """Run one step of the engine; the requests that ended in it.

        Raises EngineError if the engine as a whole cannot go on.
        """
        self._check_open()
        if not self._completed:  # else an error broke off a `run`: what had ended comes first
            self._advance()
        return self._take_completed()

    def run(self) -> list[CompletedRequest]:
        """Run until no work is left; the requests that ended, in the order of their ends.

        Raises EngineError if the engine as a whole cannot go on; `step` still gives what had ended.
        """
        while self.has_pending_work():
            self._check_open()
            self._advance()
        return self._take_completed()

    def _advance(self) -> None:
        """Run one step."""
        if self.has_pending_work():
            self._compute.keep_alive()
            self._loop.step()

    def _take_completed(self) -> list[CompletedRequest]:
        completed, self._completed = self._completed, []
        return completed

    def has_pending_work(self) -> bool:
        """Whether any request has not ended, or one that has still holds blocks."""
        return self._finalizer.alive and self._loop.has_pending_work

    def list_requests(self) -> list[RequestInfo]:
        """Return what the requests under way are doing, oldest first: states and timestamps."""
        self._check_open()
        return self._loop.list_requests()

    def get_memory_stats(self) -> MemoryStats:
        """Return the use of the block pool as of the last step."""
        return self._loop.memory_stats

    def get_metrics(self) -> EngineMetrics:
        """Return the engine's counts as of the last step."""
        return self._loop.metrics

    def close(self) -> None:
        """End the compute plane; what has not ended is lost. Harmless when called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineStoppedError("the engine is closed")
        if os.getpid() != self._pid:
            raise EngineStoppedError(
                "the engine belongs to the process that made it; a fork must make its own"
            )

    def _take(self, updates: Sequence[RequestUpdate]) -> None:
        """Note what a step brought."""
        for update in updates:
            pending = self._pending.get(update.request_id)
            if pending is None:
                if self._embedding is not None:
                    self._embedding.take(update)
                continue
            pending.take(update)
            if update.end is not None:
                del self._pending[update.request_id]
                self._completed.append(pending.complete(update.end))


def _check(config: EngineConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError for what cannot work, before anything is started."""
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig, got {config!r:.100}", field="config")
    config.validate()
    module, colon, _ = config.executor.partition(":")
    if colon and module == "__main__":
        raise ConfigError(
            "executor: another process imports it, so it cannot live in __main__, "
            f"got {config.executor!r}; put it into a module",
            field="executor",
        )
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        names = sorted(name for name in dir(Tokenizer) if not name.startswith("_"))
        missing = [name for name in names if not hasattr(tokenizer, name)]
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} has no {', '.join(missing)}", field="tokenizer"
        )


def _close_in_process(pid: int, resources: contextlib.ExitStack) -> None:
    """Release what the engine holds, but not from a fork of its process."""
    if os.getpid() == pid:
        resources.close()
