//! Seven images that are related as a fleet's are: bases that were patched and got other packages, and on them sets of
//! Python packages in several patch versions, other sets with some of the same packages, and two sets of npm packages.
//!
//! | image | layers |
//! |---|---|
//! | `pandas-1`, `-2`, `-3` | three patch versions of one image: the base as released, with its security updates, and then with other packages; numpy 2.4.4, 2.4.5, 2.4.6; pandas 3.1.0, 3.1.0, 3.1.1 |
//! | `scipy` | the first base; numpy 2.4.6, scipy, scikit-learn |
//! | `flask` | the second base; flask, sqlalchemy, requests |
//! | `node-1`, `-2` | the first and the third base; a web application's packages, some of them newer or more |
//!
//! Equal layers are shared by every converter already, deduplication or not; here it is about the rest.

use super::{Layer, cache_dir, debian, layer, layout, node, python};
use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Names the recipes, as [`super::SERIES`].
const SERIES: &str = "related-1";

/// An image of the family.
#[derive(Debug)]
pub(crate) struct Related {
    /// Its name.
    pub(crate) name: &'static str,
    /// An OCI layout with it under the tag `latest`.
    pub(crate) layout: PathBuf,
    /// Bottom layer first.
    pub(crate) layers: Vec<Layer>,
}

/// In the order in which they are converted.
const IMAGES: [(&str, [&str; 2]); 7] = [
    ("pandas-1", ["base-1", "pandas-1"]),
    ("scipy", ["base-1", "scipy"]),
    ("flask", ["base-2", "flask"]),
    ("pandas-2", ["base-2", "pandas-2"]),
    ("node-1", ["base-1", "node-1"]),
    ("pandas-3", ["base-3", "pandas-3"]),
    ("node-2", ["base-3", "node-2"]),
];

const BASE: &str = "python3,ca-certificates,curl,git,less,procps";
const OTHER_BASE: &str = "python3,ca-certificates,openssh-client,less,procps,vim-tiny,iproute2";

fn build(name: &str, work: &Path, out: &Path) -> Result<()> {
    let pandas =
        |numpy, pandas| python::install(&[numpy, pandas, "python-dateutil==4.0.0", "tzdata==2026.6"], work, out);
    match name {
        "base-1" => debian::bootstrap(BASE, false, out),
        "base-2" => debian::bootstrap(BASE, true, out),
        "base-3" => debian::bootstrap(OTHER_BASE, true, out),
        "pandas-1" => pandas("numpy==2.4.4", "pandas==3.1.0"),
        "pandas-2" => pandas("numpy==2.4.5", "pandas==3.1.0"),
        "pandas-3" => pandas("numpy==2.4.6", "pandas==3.1.1"),
        "scipy" => {
            let packages =
                ["numpy==2.4.6", "scipy==1.17.1", "scikit-learn==1.9.1", "joblib==1.6.0", "threadpoolctl==3.8.0"];
            python::install(&packages, work, out)
        }
        "flask" => python::install(&FLASK, work, out),
        "node-1" => {
            let packages = ["react@18.3.1", "react-dom@18.3.1", "typescript@5.9.2", "webpack@5.103.0"];
            node::install(&[&["express@5.1.0", "lodash@4.17.21"][..], &packages].concat(), work, out)
        }
        "node-2" => {
            let packages = ["next@14.2.33", "react@18.3.1", "react-dom@18.3.1", "typescript@5.9.3", "webpack@5.104.1"];
            node::install(&[&["express@5.1.0", "lodash@4.17.21"][..], &packages].concat(), work, out)
        }
        other => unreachable!("no layer is called {other}"),
    }
}

const FLASK: [&str; 15] = [
    "blinker==1.9.0",
    "certifi==2026.10.19.post1",
    "charset-normalizer==3.5.3",
    "click==8.5.1",
    "flask==3.1.3",
    "gunicorn==27.0.1",
    "idna==3.20",
    "itsdangerous==2.2.0",
    "jinja2==3.1.6",
    "markupsafe==3.0.4",
    "requests==2.34.2",
    "sqlalchemy==2.1.9",
    "typing-extensions==4.16.0",
    "urllib3==2.8.0",
    "werkzeug==3.1.9",
];

/// The images; layers that are not there yet are built.
pub(crate) fn images() -> Result<Vec<Related>> {
    let dir = cache_dir()?.join(SERIES);
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let made = |name: &&str| {
        layer(&dir, name, &|work, out| build(name, work, out))
            .with_context(|| format!("layer `{name}` of the related images"))
    };
    let image = |(name, layers): &(&'static str, [&str; 2])| {
        let layers: Vec<Layer> = layers.iter().map(made).collect::<Result<_>>()?;
        let layout = dir.join(format!("layout-{name}"));
        layout::write(&layout, &layers)?;
        Ok(Related { name, layout, layers })
    };
    IMAGES.iter().map(image).collect()
}
