"""A run as one HTML file: see docs/report.md."""

from .writing import write_report as write_report
