"""Renders a run as a single HTML file: see docs/report.md."""

from .writing import write_report as write_report
