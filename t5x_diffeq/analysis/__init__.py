"""Analysis of trained models: spectra, Lyapunov exponents, clustering (paper, section 5)."""
