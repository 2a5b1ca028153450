/* Search in a site that is read from files. Browsers start no worker from a file, and the theme's search is a worker, so
   a hidden frame runs its script instead. Over http, workers stay as they are. */
(() => {
  "use strict";
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const script = frame.contentDocument.createElement("script");
      script.src = String(url);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve, reject) => { Object.assign(script, { onload: resolve, onerror: reject }); });
      frame.contentDocument.head.append(script);
    }

    async postMessage(data) {
      await this.loaded;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
  }

  window.Worker = window.IFrameWorker = IFrameWorker;  // by the second name, the search knows where it runs
})();
