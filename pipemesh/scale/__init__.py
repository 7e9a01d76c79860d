"""The command `pipemesh scale`; `pipemesh.plan.many_devices` makes its forecasts."""
