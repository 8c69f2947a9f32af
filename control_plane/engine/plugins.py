"""Which scheduler and which KV cache manager the engine runs with: ours, or a user's own.

A user's own is a class or function that is called like ours (`SchedulerFactory`,
`KVCacheFactory`), given as it is or by name, `module:attribute`. What it returns must have the
methods of `SchedulerProtocol` or `KVCacheManagerProtocol`; with a KV cache manager that has not
those of `SharingKVCacheManagerProtocol` too, nothing is shared and nothing is found again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from control_plane.core.interface import SchedulerConfig, SchedulerProtocol
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.kv_interface import KVCacheManagerProtocol
from control_plane.core.scheduler import Scheduler
from control_plane.engine.plane import PlaneDescription
from planes.errors import ConfigError, EngineError

T = TypeVar("T")


class SchedulerFactory(Protocol):
    """What makes a scheduler: `Scheduler`, or a user's own."""

    def __call__(
        self, config: SchedulerConfig, kv_cache: KVCacheManagerProtocol, /
    ) -> SchedulerProtocol:
        """Return a scheduler within these limits over this KV cache manager."""
        ...


class KVCacheFactory(Protocol):
    """What makes a KV cache manager: `KVCacheManager`, or a user's own."""

    def __call__(
        self, num_blocks: int, block_size: int, /, *, prefix_cache: bool, roles_matter: bool
    ) -> KVCacheManagerProtocol:
        """Return a manager of that many blocks.

        `prefix_cache`: full blocks may be found again. `roles_matter`: keys and values of prompt
        tokens have other bits than those of generated ones.
        """
        ...


@dataclass(frozen=True, slots=True)
class CoreFactories:
    """What makes the two parts of the scheduling core."""

    scheduler: SchedulerFactory = Scheduler
    kv_cache: KVCacheFactory = KVCacheManager

    @classmethod
    def load(
        cls, scheduler: SchedulerFactory | str | None, kv_cache: KVCacheFactory | str | None
    ) -> CoreFactories:
        """Return the factories that are meant; None is ours. Raises ConfigError."""
        return cls(
            _load(scheduler, Scheduler, "scheduler"),
            _load(kv_cache, KVCacheManager, "kv_cache_manager"),
        )

    def make(
        self, config: SchedulerConfig, plane: PlaneDescription, *, prefix_cache: bool
    ) -> tuple[SchedulerProtocol, KVCacheManagerProtocol]:
        """Return scheduler and KV cache manager for a compute plane. Raises ConfigError."""
        kv_cache = _call(
            lambda: self.kv_cache(
                plane.num_blocks,
                plane.block_size,
                prefix_cache=prefix_cache,
                roles_matter=plane.tells_prompts_apart,
            ),
            KVCacheManagerProtocol,
            "kv_cache_manager",
        )
        _check_pool(kv_cache, plane)
        scheduler = _call(
            lambda: self.scheduler(config, kv_cache),
            SchedulerProtocol,
            "scheduler",
        )
        return scheduler, kv_cache


def _load(given: T | str | None, ours: T, field: str) -> T:
    """Return what is meant: ours, what is given, or what has that name."""
    if given is None:
        return ours
    target: Any = _import(given, field) if isinstance(given, str) else given
    if not callable(target):
        raise ConfigError(
            f"{field}: {given!r} must be callable, got {type(target).__name__}", field=field
        )
    loaded: T = target
    return loaded


def _import(name: str, field: str) -> object:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{field} must be module:attribute, got {name!r}", field=field)
    try:
        target: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except Exception as error:
        # Importing runs a user's own code, which may raise anything.
        raise ConfigError(
            f"{field}: {name} cannot be imported: {type(error).__name__}: {error}", field=field
        ) from error
    return target


def _call(make: Callable[[], T], protocol: object, field: str) -> T:
    """Make a part and see that it has the methods of its protocol."""
    try:
        made = make()
    except EngineError:
        raise
    except Exception as error:
        # A user's own code: whatever it raises means that there is no such part.
        raise ConfigError(
            f"{field}: making it failed: {type(error).__name__}: {error}", field=field
        ) from error
    wanted = [name for name in dir(protocol) if not name.startswith("_")]
    missing = sorted(name for name in wanted if not hasattr(made, name))
    if missing:
        raise ConfigError(
            f"{field}: {type(made).__name__} has no {', '.join(missing)}", field=field
        )
    return made


def _check_pool(kv_cache: KVCacheManagerProtocol, plane: PlaneDescription) -> None:
    """Raise ConfigError for a manager that would name blocks that the plane does not have."""
    total = kv_cache.get_memory_stats().total_blocks
    if total > plane.num_blocks or kv_cache.block_size != plane.block_size:
        raise ConfigError(
            f"kv_cache_manager: it manages {total} blocks of {kv_cache.block_size} tokens, the "
            f"compute plane has {plane.num_blocks} of {plane.block_size}",
            field="kv_cache_manager",
        )
