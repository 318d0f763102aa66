"""Packaging: everything said here is read from settings.ini, the one place that nbdev reads as well."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
parser = ConfigParser()
parser.read(HERE / 'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    license=cfg['license'],
    keywords=cfg['keywords'],
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg['requirements'].split(),
    extras_require={extra: cfg[f'{extra}_requirements'].split() for extra in ('notebooks', 'cluster', 'dev')},
    entry_points={'console_scripts': cfg['console_scripts'].split('\n')},
    packages=[cfg['lib_path']],
    # sparse_irm/notebooks is a link to nbs/reproduce: a checkout and a wheel have the notebooks at the same path.
    package_data={cfg['lib_path']: ['*.csv', 'notebooks/*.ipynb']},
    zip_safe=False,
)
