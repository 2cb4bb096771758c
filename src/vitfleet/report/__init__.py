"""What people see of runs: tables, figures and the HTML page, all from what runs wrote into their folders.

``runs`` reads the folders; ``columns`` declares every column of a table of results once, and ``units`` how numbers are
printed. They are shown in the terminal (``console``), as a table for a paper (``result_table``), and on the page
(``html``). Figures are data (``figures``); the page and files draw the same ones. ``evaluation`` shows evaluations of
single models.

Not here: how anything is measured (``run``, ``inference``, ``costs``).
"""
