# SPDX-License-Identifier: Apache-2.0
"""What a Python on the virtual GPU needs before anything else is imported."""

import os
import site

# Packages of the virtual GPU's folder that come with a .pth file, as numba-cuda does.
site.addsitedir(os.environ["VIRTUAL_GPU_SITE"])

# JAX looks for the kernel driver's files (/dev/nvidia*) before it starts its CUDA backend.
try:
  from jax._src import hardware_utils
except ImportError:  # a Python without JAX
  pass
else:
  hardware_utils.has_visible_nvidia_gpu = lambda: True
