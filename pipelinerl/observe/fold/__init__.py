"""The one fold of the journal: lines become typed rows, and rows become the state of the run. Every page and tracker is a view of it.

rows      one journal line -> one typed row; nothing else reads a line's fields
counters  how much a counter grew, over restarts; means and quantiles
state     the rows so far -> gauges, rates, alarms, failures, and who is slow
thinned   a series that stays short, however long the run

A view keeps of the rows what it draws: the terminal the last steps, the live page some hundred points of each curve, the report everything.
"""
