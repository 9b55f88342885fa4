"""The harness lm-eval with our decoder as its model: ``python -m specheads.lm_eval_model ...``."""

from specheads.measure.lm_eval import main

if __name__ == "__main__":
    main()
