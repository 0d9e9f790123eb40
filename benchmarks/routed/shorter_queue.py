"""Ray's own by default: of two replicas the one with the shorter queue."""

from benchmarks.routed import serve

serve("ray.serve._private.request_router.pow_2_router:PowerOfTwoChoicesRequestRouter")
