"""A working day of a coding agent, sent to Keepwarm and to other servers by one client.

`script` says what is sent, `model` counts its tokens, `hosts` sends it and restarts the servers,
`cold` compares answers, `figures` makes figures and goals of the records, `page` tables of those.
"""
