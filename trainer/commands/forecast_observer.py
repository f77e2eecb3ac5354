"""Adds to a run of `meshloom train`: a forecast of its step, and the report."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..plan import run_forecast
from ..plan.comparison import compare
from ..record.run_folder import RunFolder
from ..report import write_report
from ..run.prepare import Prepared


class ForecastObserver:
    """An Observer that forecasts the step time, and checks the forecast at the end."""

    def __init__(self):
        self._forecast: run_forecast.RunForecast | None = None

    def on_start(
        self, prepared: Prepared, folder: RunFolder, start: int, hosts: Sequence[str]
    ) -> str:
        self._forecast = run_forecast.forecast_run(prepared, start, hosts)
        folder.write_json(run_forecast.FILE, self._forecast.to_json())
        return self._forecast.line()

    def on_end(
        self, prepared: Prepared, folder: RunFolder
    ) -> Iterable[tuple[str, Callable[[], Iterable[str]]]]:
        return (
            (
                "compare the forecast with the run",
                lambda: self._compare(prepared, folder),
            ),
            ("write the report", lambda: [f"Report: {write_report(folder.path)}"]),
        )

    def _compare(self, prepared: Prepared, folder: RunFolder) -> Iterator[str]:
        """Yields lines about how accurate the forecast was, if there was one."""
        forecast = self._forecast
        if forecast is None or forecast.forecast is None:
            return
        measured = run_forecast.measure(prepared, folder.path, forecast.start)
        document = forecast.to_json(measured)
        folder.write_json(run_forecast.FILE, document)
        yield from compare(document)
