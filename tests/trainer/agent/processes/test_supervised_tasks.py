"""An exception in a task, a callback or a thread of an agent is reported, wherever it comes from."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from trainer.agent.processes.background_tasks import SupervisedTasks, describe_error, report_exceptions


def fail() -> None:
    raise ZeroDivisionError("of nothing")


async def fail_later() -> None:
    await asyncio.sleep(0)
    fail()


SOURCES: dict[str, Callable[[SupervisedTasks], object]] = {
    "task": lambda tasks: tasks.spawn(fail_later()),
    "callback": lambda _: asyncio.get_running_loop().call_soon(fail),
    "thread": lambda _: threading.Thread(target=fail).start(),
}


@pytest.fixture(autouse=True)
def hook():
    before = threading.excepthook
    yield
    threading.excepthook = before


@pytest.mark.parametrize("source", SOURCES)
def test_an_exception_is_reported_and_printed(source, capsys):
    async def scene() -> BaseException:
        reported: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        report_exceptions(reported.set_result)
        SOURCES[source](SupervisedTasks())
        return await asyncio.wait_for(reported, 10)

    error = asyncio.run(scene())
    assert describe_error(error).startswith("ZeroDivisionError: of nothing (test_supervised_tasks.py:")
    assert "Traceback" in capsys.readouterr().err


def test_a_cancelled_task_and_a_future_that_was_given_up_are_no_errors():
    async def scene() -> list[BaseException]:
        errors: list[BaseException] = []
        report_exceptions(errors.append)
        tasks = SupervisedTasks()
        tasks.spawn(asyncio.sleep(60))
        tasks.cancel()
        asyncio.get_running_loop().create_future().set_exception(OSError("late"))
        await asyncio.sleep(0.05)
        return errors

    assert asyncio.run(scene()) == []
