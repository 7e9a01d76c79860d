"""Devices enough for the guides, unless the other tests have made some."""

import tensorflow as tf

_cpu = tf.config.list_physical_devices("CPU")[0]
if tf.config.get_logical_device_configuration(_cpu) is None:
    tf.config.set_logical_device_configuration(_cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
