"""`foretoken serve` with another router than ours: one module for each, as `python -m` takes it."""

from __future__ import annotations


def serve(router: str) -> None:
    """Run the command line with replicas routed by this class, `module:name`."""
    from foretoken.cli import main
    from foretoken.serve.command import prepare_own_cluster

    prepare_own_cluster()  # before Ray is imported
    from foretoken.serve import deployment

    deployment.ROUTER = router
    main()
