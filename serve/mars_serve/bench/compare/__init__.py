"""`marsray bench compare`: this server beside others, at several numbers of clients."""
