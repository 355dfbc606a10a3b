"""A run in the browser: one page, served on loopback, that follows the journals; works on a finished run too.

snapshot   journals -> what the page shows, as one JSON object, folded line by line
server     serves the page and the snapshot; refuses who has no token, and who comes by another name
`templates/view.*` of the report are the page: drawn with the report's parts and plots, it asks for nothing but the snapshot
"""
