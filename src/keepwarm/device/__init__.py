from keepwarm import blas, config

blas.preload(config.load().home)
