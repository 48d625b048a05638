"""The device: example store, eligibility, participation timer, scheduler and sessions.

Nothing here imports TensorFlow or TFF; only the execution of a plan does.
"""
