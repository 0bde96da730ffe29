"""The engines, which compute attention: each is a file or a folder, and `choice.py` selects one."""
