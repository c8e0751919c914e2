"""The processes of a run: hosts in Ray, the fork server, the roles themselves, their end."""
