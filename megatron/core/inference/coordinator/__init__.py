"""Prefix-affinity routing for megatron-core's data-parallel inference coordinator.

`patch()` puts it in the place of the released coordinator; importing this package changes nothing.
"""

from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy, routes_on_prefix
from megatron.core.inference.coordinator.runtime.patching import patch, unpatch
from megatron.core.inference.coordinator.settings import (
    CoordinatorSettings,
    RoutingSettings,
    SettingsError,
)

__all__ = [
    "Coordinator",
    "CoordinatorSettings",
    "PrefixCachingCoordinatorPolicy",
    "PrefixCachingCostPolicy",
    "RoutingSettings",
    "SettingsError",
    "patch",
    "routes_on_prefix",
    "unpatch",
]
