"""Machinery behind the strategies and their optimisers; not meant to be used by itself."""
