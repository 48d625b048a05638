"""Plans: what devices and server compute in a task, as signed data.

`building` needs TFF and makes them of a process. All others need TensorFlow at most: a
device that has `device_work`, and a server that has `server_work`, run them.
"""
