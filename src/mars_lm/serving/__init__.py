"""An OpenAI-compatible server whose speed is a live knob (SPEC 6). Needs the extra `serve`."""
