"""Entry of `python -m kvquant_hf.eval`, see `kvquant_hf.eval.cli`."""

import sys

if __name__ == "__main__":
    try:
        import lm_eval  # noqa: F401 - only asked for
    except ImportError:
        sys.exit("kvquant_hf.eval needs lm-eval: install the extra with `pip install 'kvquant-hf[eval]'`.")
    from kvquant_hf.eval.cli import main

    sys.exit(main())
