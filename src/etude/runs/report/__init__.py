"""A report of runs as one HTML file that needs no network."""

from etude.runs.report.page import write_report as write_report
