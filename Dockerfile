# `mars serve` in a container (CPU); docs/serving.md says how to build and run it.
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/mars \
    && /opt/mars/bin/pip install --constraint constraints.txt '.[serve]'

FROM python:3.11-slim
RUN useradd --system --create-home --uid 10001 mars
COPY --from=build /opt/mars /opt/mars
USER mars
ENV PATH=/opt/mars/bin:$PATH HF_HOME=/home/mars/.cache/huggingface
VOLUME /home/mars/.cache
EXPOSE 8000
# Inside a container the loopback is the container's own: the port is published, or not, from outside.
ENTRYPOINT ["mars", "serve", "--host", "0.0.0.0", "--port", "8000"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=300s \
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"
