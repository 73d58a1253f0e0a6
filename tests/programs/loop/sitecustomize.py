"""A site's own start-up module, in which a signal starts an endless loop."""

import signal


def loop_forever(*_):
    count = 0
    while True:
        count += 1


signal.signal(signal.SIGRTMAX - 3, loop_forever)
