"""Ours."""

from benchmarks.routed import serve

serve("foretoken.serve.fleet.router:PrefixRouter")
