"""A server whose parts are killed, stopped and cut off, and what must hold all the same.

`supervisor` starts real servers (a process each, gRPC over TLS, a store on disk) and devices that
speak the real protocol, through a `proxy` of its own. It draws one fault after another
(`faults`), has it strike (`armed`: parts handed to the server from outside), mends what a
supervisor of processes would mend, and waits until a round is released again. Some of the devices
may be `hostile`. `checks` judges afterwards what the store's database, SQLite or PostgreSQL, has
noted by itself (`book`), what devices and observers were told, and where a device's vector was
found (`sentinels`). `schedules` does the same in simulated time, thousands of times more often;
this is the truth about processes, sockets and disks.
"""
