"""The package holds the decisions: plain classes without asyncio, clock or socket. The live run and the simulator drive the same
classes.
"""
