"""The device: its examples, when it may work, how often it takes part, and one session.

Nothing here imports TensorFlow or TFF; only what executes a plan does.
"""
