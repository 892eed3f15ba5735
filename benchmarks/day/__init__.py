"""A working day of a coding agent, sent to Keepwarm and to other servers by one client.

`script` says what is sent, `hosts` sends it and does to the servers what the day does to them,
`figures` makes figures and goals of what was noted, `page` tables of those.
"""
