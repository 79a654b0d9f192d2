"""Limit of the host: a device cannot run faster than its operators are launched.

    t = (D^4 + (N h)^4)^(1/4)

D: device time of a pass, in s. N: operators that the host launches. h: fitted time of one launch in s, with Python's
overhead. The slower of device and host determines the time; where both are close, some operators wait for the host and
others for the device, which the power mean describes.
"""


def launch_bound_seconds(device_seconds: float, num_operators: float, host_seconds: float) -> float:
    """Return the time of operators that take `device_seconds` on the device."""
    return (device_seconds**4 + (num_operators * host_seconds) ** 4) ** 0.25
