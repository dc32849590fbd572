//! Which places hold the images of a registry: its mirrors, and itself.
//!
//! From the command line (`HOST=MIRROR[,MIRROR…]`) and from containers-registries.conf(5), of which tables `[[registry]]`
//! with `prefix`, `location`, `insecure`, `blocked` and `[[registry.mirror]]` are taken; short names and the old format
//! (version 1) are not.

use super::reference::Place;
use serde::Deserialize;
use std::str::FromStr;

/// Mirrors of one registry, or of a part of it, from the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorRule {
    prefix: String,
    mirrors: Vec<String>,
}

/// Why a text is no [`MirrorRule`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` names no mirror (expected HOST[/PATH]=MIRROR[/PATH][,MIRROR…], such as docker.io=mirror.example.org)")]
pub struct MirrorRuleError(String);

impl FromStr for MirrorRule {
    type Err = MirrorRuleError;

    fn from_str(s: &str) -> Result<Self, MirrorRuleError> {
        let fail = || MirrorRuleError(super::reference::printable(s, 300));
        let (prefix, mirrors) = s.split_once('=').ok_or_else(fail)?;
        let rule = Self { prefix: prefix.to_owned(), mirrors: mirrors.split(',').map(str::to_owned).collect() };
        let sound = is_location(prefix) && rule.mirrors.iter().all(|mirror| is_location(mirror));
        sound.then_some(rule).ok_or_else(fail)
    }
}

/// Whether a text is a host, perhaps with a port and a path.
fn is_location(text: &str) -> bool {
    let name = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b));
    let mut parts = text.split('/');
    let host = parts.next().unwrap_or_default();
    let (host, port) = host.split_once(':').map_or((host, None), |(host, port)| (host, Some(port)));
    host.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name(host)
        && port.is_none_or(|port| port.parse::<u16>().is_ok())
        && parts.all(|part| name(part) && !part.starts_with('.'))
}

/// What a `registries.conf` says.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Registries {
    #[serde(default, rename = "registry")]
    registries: Vec<Registry>,
}

#[derive(Debug, Deserialize)]
struct Registry {
    prefix: Option<String>,
    location: Option<String>,
    #[serde(default)]
    insecure: bool,
    #[serde(default)]
    blocked: bool,
    #[serde(default, rename = "mirror-by-digest-only")]
    by_digest_only: bool,
    #[serde(default, rename = "mirror")]
    mirrors: Vec<Mirror>,
}

#[derive(Debug, Deserialize)]
struct Mirror {
    location: String,
    #[serde(default)]
    insecure: bool,
    #[serde(default, rename = "pull-from-mirror")]
    pull: Option<String>,
}

/// A place to ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) place: Place,
    /// Whether HTTP without TLS will do.
    pub(super) insecure: bool,
}

impl Registries {
    /// # Errors
    /// Why it is not valid.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let parsed: Self = toml::from_str(text).map_err(|e| e.message().to_owned())?;
        for registry in &parsed.registries {
            let locations = registry.location.iter().chain(registry.mirrors.iter().map(|mirror| &mirror.location));
            for location in locations {
                if !is_location(location) {
                    return Err(format!("`{}` is no location", super::reference::printable(location, 300)));
                }
            }
        }
        Ok(parsed)
    }

    /// Adds what another file says; that counts where both are about the same prefix.
    pub(super) fn extend(&mut self, later: Self) {
        self.registries.retain(|old| !later.registries.iter().any(|new| new.prefix() == old.prefix()));
        self.registries.extend(later.registries);
    }

    /// Where to ask for `place`, mirrors first. `to_read` is false for pushing, which mirrors are not for, `by_digest`
    /// whether the manifest's digest is given.
    ///
    /// # Errors
    /// The prefix that blocks it.
    pub(super) fn candidates(
        &self,
        rules: &[MirrorRule],
        place: &Place,
        to_read: bool,
        by_digest: bool,
    ) -> Result<Vec<Candidate>, String> {
        let matching = self.registries.iter().filter_map(|r| Some((r, matched(r.prefix()?, place)?)));
        let entry = matching.max_by_key(|(_, len)| *len).map(|(registry, _)| registry);
        let mut found = Vec::new();
        let rule = rules.iter().filter_map(|r| Some((r, matched(&r.prefix, place)?))).max_by_key(|(_, len)| *len);
        if let Some((rule, len)) = rule.filter(|_| to_read) {
            found.extend(
                rule.mirrors.iter().map(|mirror| Candidate { place: moved(place, len, mirror), insecure: false }),
            );
        }
        let Some(registry) = entry else {
            found.push(Candidate { place: place.clone(), insecure: false });
            return Ok(found);
        };
        let prefix = registry.prefix().unwrap_or_default();
        if registry.blocked {
            return Err(prefix.to_owned());
        }
        let len = matched(prefix, place).unwrap_or_default();
        // What was said on the command line counts, not both.
        for mirror in registry.mirrors.iter().filter(|_| to_read && found.is_empty()).collect::<Vec<_>>() {
            let taken = match mirror.pull.as_deref() {
                Some("digest-only") => by_digest,
                Some("tag-only") => !by_digest,
                _ => by_digest || !registry.by_digest_only,
            };
            if taken {
                found.push(Candidate { place: moved(place, len, &mirror.location), insecure: mirror.insecure });
            }
        }
        let location = registry.location.as_deref();
        let own = location.map_or_else(|| place.clone(), |location| moved(place, len, location));
        found.push(Candidate { place: own, insecure: registry.insecure });
        Ok(found)
    }
}

impl Registry {
    fn prefix(&self) -> Option<&str> {
        self.prefix.as_deref().filter(|prefix| !prefix.is_empty()).or(self.location.as_deref())
    }
}

/// How many bytes of the place's whole name `prefix` stands for; `None` when it is about others. `*.example.org` is
/// about all hosts below that one.
fn matched(prefix: &str, place: &Place) -> Option<usize> {
    let whole = place.to_string();
    if let Some(suffix) = prefix.strip_prefix('*') {
        let host = place.host().split(':').next().unwrap_or_default();
        return (suffix.starts_with('.') && host.ends_with(suffix)).then_some(place.host().len());
    }
    let rest = whole.strip_prefix(prefix)?;
    (rest.is_empty() || rest.starts_with('/')).then_some(prefix.len())
}

/// `place` with the first `len` bytes of its whole name replaced.
fn moved(place: &Place, len: usize, location: &str) -> Place {
    let whole = format!("{location}{}", &place.to_string()[len..]);
    let (host, repository) = whole.split_once('/').unwrap_or((&whole, ""));
    Place::new(host, repository)
}

#[cfg(test)]
mod tests {
    use super::super::ImageRef;
    use super::*;
    use proptest::prelude::*;

    const FILE: &str = r#"
        unqualified-search-registries = ["docker.io"]
        [[registry]]
        location = "docker.io"
        [[registry.mirror]]
        location = "m1.io/hub"
        insecure = true
        [[registry.mirror]]
        location = "m2.io:5000"
        pull-from-mirror = "digest-only"
        [[registry]]
        prefix = "docker.io/library"
        location = "base.io/images"
        [[registry]]
        prefix = "*.corp.io"
        location = "corp.io"
        [[registry]]
        prefix = "evil.io"
        blocked = true
    "#;

    fn candidates(file: &str, rules: &[&str], image: &str, to_read: bool) -> Result<Vec<String>, String> {
        let rules: Vec<MirrorRule> = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let image: ImageRef = image.parse().unwrap();
        let by_digest = matches!(image.which(), super::super::Which::Digest(_));
        let found = Registries::parse(file)?.candidates(&rules, image.place(), to_read, by_digest)?;
        Ok(found.iter().map(|c| format!("{}{}", c.place, if c.insecure { "!" } else { "" })).collect())
    }

    #[test]
    fn the_longest_prefix_and_its_mirrors() {
        let digest = format!("docker.io/team/app@{}", crate::Digest::of(b""));
        for (image, expected) in [
            ("team/app", &["m1.io/hub/team/app!", "docker.io/team/app"][..]),
            (&digest, &["m1.io/hub/team/app!", "m2.io:5000/team/app", "docker.io/team/app"]),
            ("alpine", &["base.io/images/alpine"]),
            ("docker.io/librarya/b", &["m1.io/hub/librarya/b!", "docker.io/librarya/b"]),
            ("a.corp.io/x/y", &["corp.io/x/y"]),
            ("corp.io/x", &["corp.io/x"]),
            ("quay.io/x", &["quay.io/x"]),
        ] {
            assert_eq!(candidates(FILE, &[], image, true).unwrap(), expected, "{image}");
        }
        assert_eq!(candidates(FILE, &[], "evil.io/x", true), Err("evil.io".to_owned()));
        assert_eq!(candidates(FILE, &[], "team/app", false).unwrap(), ["docker.io/team/app"]);
    }

    #[test]
    fn the_command_line_comes_first() {
        let rules = ["docker.io=a.io,b.io:1/x", "docker.io/team=c.io"];
        assert_eq!(
            candidates("", &rules, "other/app", true).unwrap(),
            ["a.io/other/app", "b.io:1/x/other/app", "docker.io/other/app"]
        );
        assert_eq!(candidates(FILE, &rules, "team/app", true).unwrap(), ["c.io/app", "docker.io/team/app"]);
        assert_eq!(candidates("", &rules, "team/app", false).unwrap(), ["docker.io/team/app"]);
        for bad in ["", "a", "a=", "=b", "a=b,", "a=http://b", "a=b c", "a=b/../c", "a:x=b"] {
            assert!(bad.parse::<MirrorRule>().is_err(), "{bad}");
        }
    }

    #[test]
    fn files_that_are_not_valid() {
        for bad in [
            "x",
            "registry = 5",
            "[[registry]]\nlocation = \"a b\"",
            "[[registry]]\n[[registry.mirror]]\nlocation = \"../x\"",
        ] {
            assert!(Registries::parse(bad).is_err(), "{bad}");
        }
        let mut first = Registries::parse(FILE).unwrap();
        first.extend(Registries::parse("[[registry]]\nlocation = \"docker.io\"").unwrap());
        let place = "team/app".parse::<ImageRef>().unwrap();
        assert_eq!(first.candidates(&[], place.place(), true, false).unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn any_file(text in r#"(\[\[registry\]\]\n)?((prefix|location|blocked|mirror) = ("[a-z*./]{0,9}"|true|\[\])\n){0,4}|.{0,60}"#) {
            if let Ok(file) = Registries::parse(&text) {
                let image: ImageRef = "a.b/c/d".parse().unwrap();
                let _ = file.candidates(&[], image.place(), true, false);
            }
        }
    }
}
