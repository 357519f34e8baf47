"""All plugins, by the name that a plan refers to them with."""

from __future__ import annotations

from dflash_plugins.base import PluginKind
from dflash_plugins.confidence_commit.plugin import ConfidenceCommit
from dflash_plugins.kv_injection.plugin import BlockWrite, KVInjection
from dflash_plugins.mixture_of_experts.plugin import MixtureOfExperts
from dflash_plugins.speculative_verify.plugin import SpeculativeVerify

KINDS: dict[str, type[PluginKind]] = {
    kind.name: kind
    for kind in (KVInjection, BlockWrite, ConfidenceCommit, SpeculativeVerify, MixtureOfExperts)
}
