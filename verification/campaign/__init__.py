"""A fault campaign: parts of a real server are killed, stopped and cut off, and laws must hold.

`supervisor` starts real servers (a process each, gRPC over TLS, a store on disk) and devices that
speak the real protocol, through a `proxy` of its own. It draws one fault after another
(`faults`), injects it (`fault_injection`: parts handed to the server from outside), repairs what a
supervisor of processes would repair, and waits until a round is released again. Some of the devices
may be `hostile`. Afterwards `checks` judges three records: what the store's database, SQLite or
PostgreSQL, has logged by itself (`database_log`), the events that devices and observers received,
and where a device's vector was found (`memory_search`). `verification.schedules` does the same in
simulated time, thousands of times more often; this is the truth about processes, sockets and disks.
"""
