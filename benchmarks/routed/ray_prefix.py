"""Ray's own by prefix, by the path that needs no pyarrow."""

from benchmarks.routed import serve

_MODULE = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
serve(f"{_MODULE}:PrefixCacheAffinityRouter")
