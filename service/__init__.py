"""The gRPC service over numba_engine: ``numba-engine serve MODEL``, or ``python -m service``.

``servicer.py`` answers the RPCs, ``engine_loop.py`` runs the engine in its own thread, ``server.py`` starts and stops.
"""
