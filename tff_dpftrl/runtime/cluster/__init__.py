"""The server on many machines: the actors of `runtime.actors`, on hosts that Ray runs."""
