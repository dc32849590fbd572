//! The files in which docker and podman keep credentials: `config.json` and `auth.json` (containers-auth.json(5)).
//! Bytes and a repository in, credentials or the name of a helper out.

use super::reference::{DOCKER_HUB, Place};
use base64::Engine as _;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;

/// Most bytes of such a file.
pub(super) const LIMIT: u64 = 4 << 20;

/// What shows a registry who asks.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Credentials {
    /// A user name and a password.
    Password { user: String, password: String },
    /// What a token server gave at login, to be changed into tokens.
    Identity(String),
    /// A token for the registry itself.
    Token(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Secrets are not for logs.
        match self {
            Self::Password { user, .. } => write!(f, "Password({user})"),
            Self::Identity(_) => f.write_str("Identity"),
            Self::Token(_) => f.write_str("Token"),
        }
    }
}

/// What a file says of a repository.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// The credentials themselves.
    Credentials(Credentials),
    /// The program `docker-credential-NAME` knows, under the server's name.
    Helper { name: String, server: String },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AuthFile {
    auths: Option<BTreeMap<String, Option<RawAuth>>>,
    creds_store: Option<String>,
    cred_helpers: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
struct RawAuth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

impl AuthFile {
    /// # Errors
    /// Why it is not valid.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        // An empty file is what some tools leave behind; it has no credentials.
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self { auths: None, creds_store: None, cred_helpers: None });
        }
        serde_json::from_slice(bytes).map_err(|e| e.to_string())
    }

    /// What the file says of `place`: the helper for its host; else the entry whose name is the longest prefix of the
    /// repository's; else the helper for all that is not told otherwise.
    ///
    /// # Errors
    /// Why the entry cannot be used.
    pub(super) fn find(&self, place: &Place) -> Result<Option<Entry>, String> {
        let helpers = self.cred_helpers.iter().flatten().filter(|(_, name)| !name.is_empty());
        let helpers: Vec<_> = helpers.map(|(key, name)| (normal(key), key, name)).collect();
        let auths: Vec<_> = self.auths.iter().flatten().map(|(key, auth)| (normal(key), key, auth)).collect();
        for candidate in prefixes(place) {
            if let Some((_, key, name)) = helpers.iter().find(|(normal, ..)| *normal == candidate) {
                return Ok(Some(Entry::Helper { name: (*name).clone(), server: (*key).clone() }));
            }
            for (_, key, auth) in auths.iter().filter(|(normal, ..)| *normal == candidate) {
                let found = auth.as_ref().map_or(Ok(None), RawAuth::credentials);
                if let Some(found) = found.map_err(|why| format!("the entry `{key}` {why}"))? {
                    return Ok(Some(Entry::Credentials(found)));
                }
            }
        }
        let store = self.creds_store.as_ref().filter(|name| !name.is_empty());
        Ok(store.map(|name| {
            // docker login's own name of its hub.
            let server = if place.host() == DOCKER_HUB {
                "https://index.docker.io/v1/".to_owned()
            } else {
                place.host().to_owned()
            };
            Entry::Helper { name: name.clone(), server }
        }))
    }
}

impl RawAuth {
    fn credentials(&self) -> Result<Option<Credentials>, &'static str> {
        let given = |field: &Option<String>| field.clone().filter(|text| !text.is_empty());
        if let Some(token) = given(&self.registrytoken) {
            return Ok(Some(Credentials::Token(token)));
        }
        if let Some(token) = given(&self.identitytoken) {
            return Ok(Some(Credentials::Identity(token)));
        }
        if let Some(auth) = given(&self.auth) {
            let bytes = base64::engine::general_purpose::STANDARD.decode(auth.trim());
            let text = bytes.ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let text = text.ok_or("has an `auth` that is not base64")?;
            let (user, password) = text.split_once(':').ok_or("has an `auth` without a colon in it")?;
            let password = password.trim_end_matches('\0').to_owned();
            return Ok(Some(Credentials::Password { user: user.to_owned(), password }));
        }
        Ok(given(&self.username)
            .zip(given(&self.password))
            .map(|(user, password)| Credentials::Password { user, password }))
    }
}

/// What a helper printed, as credentials.
///
/// # Errors
/// Why it is no answer.
pub(super) fn parse_helper(bytes: &[u8]) -> Result<Credentials, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Answer {
        username: String,
        secret: String,
    }
    let Answer { username, secret } = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    Ok(match username.as_str() {
        "<token>" => Credentials::Identity(secret),
        _ => Credentials::Password { user: username, password: secret },
    })
}

/// The names under which credentials for a repository may stand, the narrowest first.
fn prefixes(place: &Place) -> impl Iterator<Item = String> {
    let whole = place.to_string();
    let mut ends: Vec<usize> = whole.match_indices('/').map(|(at, _)| at).collect();
    ends.push(whole.len());
    ends.into_iter().rev().map(move |end| whole[..end].to_owned())
}

/// A key in one form: docker writes addresses where podman writes names.
fn normal(key: &str) -> String {
    let rest = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://"));
    let name = match rest {
        // An address names a host; its path is an interface's version.
        Some(rest) => rest.split('/').next().unwrap_or_default(),
        None => key.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches("/v2"),
    };
    let (host, path) = name.split_once('/').map_or((name, None), |(host, path)| (host, Some(path)));
    let host = if matches!(host, "index.docker.io" | "registry-1.docker.io") { DOCKER_HUB } else { host };
    path.map_or_else(|| host.to_owned(), |path| format!("{host}/{path}"))
}

#[cfg(test)]
mod tests {
    use super::super::ImageRef;
    use super::*;
    use proptest::prelude::*;

    fn find(file: &str, image: &str) -> Result<Option<Entry>, String> {
        AuthFile::parse(file.as_bytes())?.find(image.parse::<ImageRef>().unwrap().place())
    }

    fn user(file: &str, image: &str) -> Option<String> {
        match find(file, image).unwrap()? {
            Entry::Credentials(Credentials::Password { user, password }) => Some(format!("{user}:{password}")),
            other => panic!("{other:?}"),
        }
    }

    fn auth(text: &str) -> String {
        base64::engine::general_purpose::STANDARD.encode(text)
    }

    #[test]
    fn the_longest_prefix_decides() {
        let file = format!(
            r#"{{"auths":{{"quay.io":{{"auth":"{}"}},"quay.io/team":{{"auth":"{}"}},"quay.io/team/app":{{"auth":"{}"}}}}}}"#,
            auth("host:1"),
            auth("team:2:x"),
            auth("app:3")
        );
        for (image, expected) in [
            ("quay.io/team/app:1", Some("app:3")),
            ("quay.io/team/app/sub", Some("app:3")),
            ("quay.io/team/apple", Some("team:2:x")),
            ("quay.io/tea/app", Some("host:1")),
            ("quay.io:443/team/app", None),
            ("other.io/team/app", None),
        ] {
            assert_eq!(user(&file, image).as_deref(), expected, "{image}");
        }
    }

    #[test]
    fn docker_hub_has_many_names() {
        for key in [
            "https://index.docker.io/v1/",
            "docker.io",
            "index.docker.io",
            "https://registry-1.docker.io/v2/",
            "docker.io/library/alpine",
        ] {
            let file = format!(r#"{{"auths":{{"{key}":{{"auth":"{}"}}}}}}"#, auth("a:b"));
            assert_eq!(user(&file, "alpine").as_deref(), Some("a:b"), "{key}");
        }
        let file = format!(r#"{{"auths":{{"http://localhost:5000/v2/":{{"auth":"{}"}}}}}}"#, auth("a:b"));
        assert_eq!(user(&file, "localhost:5000/x").as_deref(), Some("a:b"));
    }

    #[test]
    fn helpers_and_tokens() {
        let helper =
            |name: &str, server: &str| Ok(Some(Entry::Helper { name: name.to_owned(), server: server.to_owned() }));
        let file = format!(
            r#"{{"credsStore":"all","credHelpers":{{"gcr.io":"gcloud"}},
                 "auths":{{"quay.io":{{"auth":"{}"}},"gcr.io":{{"auth":"x"}},"docker.io":{{}},"b.io":null,
                          "i.io":{{"auth":"{}","identitytoken":"id"}},"r.io":{{"registrytoken":"reg"}}}}}}"#,
            auth("a:b"),
            auth("a:")
        );
        assert_eq!(find(&file, "gcr.io/a/b"), helper("gcloud", "gcr.io"));
        assert_eq!(user(&file, "quay.io/a").as_deref(), Some("a:b"));
        assert_eq!(find(&file, "b.io/a"), helper("all", "b.io"));
        assert_eq!(find(&file, "alpine"), helper("all", "https://index.docker.io/v1/"));
        assert_eq!(find(&file, "i.io/a"), Ok(Some(Entry::Credentials(Credentials::Identity("id".into())))));
        assert_eq!(find(&file, "r.io/a"), Ok(Some(Entry::Credentials(Credentials::Token("reg".into())))));
        assert_eq!(find("{}", "quay.io/a"), Ok(None));
        assert_eq!(find("", "quay.io/a"), Ok(None));
    }

    #[test]
    fn broken_entries_are_named() {
        for value in ["!!", &auth("no colon"), &base64::engine::general_purpose::STANDARD.encode([0xff, b':'])] {
            let file = format!(r#"{{"auths":{{"quay.io":{{"auth":"{value}"}}}}}}"#);
            assert!(find(&file, "quay.io/a").unwrap_err().contains("`quay.io`"), "{value}");
            // What is broken elsewhere does not matter.
            assert_eq!(find(&file, "b.io/a"), Ok(None));
        }
    }

    #[test]
    fn helpers_answers() {
        let answer = |text: &str| parse_helper(text.as_bytes());
        let password = Credentials::Password { user: "u".into(), password: "p".into() };
        assert_eq!(answer(r#"{"ServerURL":"x","Username":"u","Secret":"p"}"#), Ok(password));
        assert_eq!(answer(r#"{"Username":"<token>","Secret":"p"}"#), Ok(Credentials::Identity("p".into())));
        assert!(answer("credentials not found").is_err());
        assert_eq!(format!("{:?}", answer(r#"{"Username":"u","Secret":"hunter2"}"#).unwrap()), "Password(u)");
    }

    proptest! {
        #[test]
        fn any_file(bytes in prop::collection::vec(any::<u8>(), 0..300), key in "(https?://)?[a-z./:]{0,12}", auth in ".{0,12}") {
            let place = Place::new("a.b", "c/d");
            let json = serde_json::json!({ "auths": { &key: { "auth": auth } }, "credHelpers": { &key: "x" }, "credsStore": "y" });
            for bytes in [&bytes[..], json.to_string().as_bytes()] {
                if let Ok(file) = AuthFile::parse(bytes) {
                    let _ = file.find(&place);
                }
            }
            let _ = parse_helper(&bytes);
        }
    }
}
