"""Replicas: several engines at one address.

A `Front` (front.py) gets requests over HTTP and sends each, as a `Call` (call.py), to a `Replica`
(replica.py), which has one engine and the application of a single server. Ray Serve starts and
watches replicas, and carries the messages (../deployment.py, router.py). Our own server
(command.py) or Ray Serve's proxies receive the requests for the front.
"""
