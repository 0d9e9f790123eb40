"""Replicas: several engines at one address.

A `Front` gets requests over HTTP, from our own server (command.py) or from Ray Serve's proxies. It
sends each as a `Call` to a `Replica`, which has one engine and the application of a single server.
Ray Serve starts and watches replicas, and carries the messages. Only command.py, replica.py,
router.py and ../deployment.py import Ray.
"""
