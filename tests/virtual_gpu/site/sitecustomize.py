"""JAX looks for the kernel driver's files (/dev/nvidia*) before it starts its CUDA backend."""

try:
  from jax._src import hardware_utils
except ImportError:  # a Python without JAX
  pass
else:
  hardware_utils.has_visible_nvidia_gpu = lambda: True
